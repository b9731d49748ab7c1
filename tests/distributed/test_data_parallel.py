"""What needs no ranks: the options of a reducer, one device, and how buckets are filled."""
import mindspore as ms
import pytest
from mindspore import nn
from support.protocols import network_of

from ms_accum import Accumulator, DataParallel, make_train_step, shard_parameters
from ms_accum.distributed.buckets import Buckets, filled


@pytest.mark.parametrize(("options", "message"), [
    ({"sync": "steps"}, "sync is 'steps', expected"), ({"zero": 3}, "zero is 3, expected"),
    ({"zero": 1, "sync": "microbatch"}, r'got zero=1 with sync="microbatch"; give zero=1 with sync="window", .*'),
    ({"zero": 2, "sync": "window"}, r'got zero=2 with sync="window"; give .* zero=2 with "microbatch" or "node"'),
    ({"ranks_per_node": 2}, r'got ranks_per_node=2 with sync="window", which does not use nodes; give sync="node"'),
    ({"bucket_mib": 0}, "bucket_mib is 0, expected a finite number"), ({"elementwise": "yes"}, "elementwise is 'yes'")])
def test_options_that_do_not_fit(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DataParallel(**options)


def test_a_reducer_says_when_ranks_exchange():
    assert DataParallel().sync == "window"
    assert DataParallel(zero=2).sync == "microbatch"


def test_on_one_device_nothing_is_cut_or_exchanged():
    parameters = network_of(0).trainable_params()
    assert shard_parameters(parameters) is parameters
    optimizer = nn.SGD(shard_parameters(parameters), 0.1)
    accumulator = Accumulator(optimizer, 2, reduction="sum", reducer=DataParallel(zero=1))
    exchange = accumulator.window.exchange
    assert (list(accumulator.weights), exchange.ranks, exchange.meet(1, 3)) == (parameters, 1, 3)


def test_what_is_no_reducer():
    optimizer = nn.SGD(network_of(0).trainable_params(), 0.1)
    with pytest.raises(TypeError, match=r"reducer is .*, expected a DataParallel, or None"):
        make_train_step(lambda x: x, optimizer, 2, reducer="window", eager=True)


def test_ranks_before_init(monkeypatch):
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    with pytest.raises(RuntimeError, match=r"msrun started several ranks, .*mindspore\.communication\.init\(\) first"):
        Accumulator(nn.SGD(network_of(0).trainable_params(), 0.1), 2, reduction="sum", reducer=DataParallel())


@pytest.mark.parametrize("given", [[1.0], [{"params": [1.0]}]])
def test_what_cannot_be_cut(given, monkeypatch):
    monkeypatch.setattr("ms_accum.distributed.data_parallel.world_size", lambda: 2)
    monkeypatch.setattr("ms_accum.distributed.data_parallel.get_rank", lambda: 1)
    with pytest.raises(TypeError, match=r"an entry of parameters is .*, expected a Parameter, or a group"):
        shard_parameters(given)
    slices = shard_parameters(network_of(0).trainable_params())
    assert [p.size for p in slices] == [6, 2, 4, 1]
    with pytest.raises(ValueError, match=r"0\.weight is already a slice; call shard_parameters only once"):
        shard_parameters(slices)
    some = nn.SGD([*slices[:1], *network_of(1).trainable_params()[1:]], 0.1)
    with pytest.raises(ValueError, match=r"the optimizer's parameters do not fit zero=0; to divide"):
        Accumulator(some, 2, reduction="sum")


def test_buckets_hold_each_tensor_once_up_to_a_limit():
    """Of one dtype each, float32 last; larger tensors alone."""
    sizes, dtypes = (3, 100, 2, 2, 5), (ms.float32, ms.float32, ms.float16, ms.float32, ms.float32)
    assert filled(sizes, dtypes, 24) == ((2,), (0,), (1,), (3,), (4,))
    assert filled(sizes, dtypes, 28) == ((2,), (0,), (1,), (3, 4))
    assert filled(sizes, dtypes, 1000) == ((2,), (0, 1, 3, 4))


def test_a_window_of_zero_sends_what_an_all_reduce_sends():
    """ReduceScatter and AllGather of a ring send half of an AllReduce each: what they add is padding."""
    shapes = [(512, 784), (512,), (512, 512), (512,), (10, 512), (10,)]
    rows = Buckets(shapes, [ms.float32] * 6, 2**20, 8, 8)
    assert 669_706 <= sum(rows.lengths) <= 1.05 * 669_706  # elements, without and with padding

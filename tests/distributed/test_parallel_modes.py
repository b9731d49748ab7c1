"""MindSpore's own parallel modes: what is refused before anything is compiled. What compiles is in test_ascend.py."""
import gc
import warnings
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import amp, nn
from mindspore.parallel.distributed import DistributedDataParallel
from support.training import sgd

from ms_accum import (
    Accumulator,
    DataParallel,
    TrainOneStepCell,
    load_checkpoint,
    make_grad_cache_step,
    make_train_step,
    save_checkpoint,
)
from ms_accum.batch_size import GradientNoiseScale
from ms_accum.core.stages import Stage
from ms_accum.distributed import parallel_modes
from ms_accum.distributed.slices import Slices
from ms_accum.selftest.comparing import values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.core


@pytest.fixture
def sharding():
    """As a script that shards by MindSpore's older interface."""
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    yield
    ms.reset_auto_parallel_context()


@pytest.fixture
def several(monkeypatch):
    """As in one of two ranks."""
    monkeypatch.setattr(parallel_modes, "initialised_ranks", lambda: 2)


class Norms(Stage):
    """A stage of a user's own that looks at gradients."""

    def weigh(self, gradients, weight):
        return weight, 1


class Counts(Stage):
    """One that does not."""

    def on_close(self, applied):
        pass


@pytest.mark.parametrize(("name", "options"), [
    ("clip_norm", {"clip_norm": 1.0}), ("on_nonfinite", {"on_nonfinite": "skip_window"}),
    ("on_nonfinite", {"on_nonfinite": "skip_microbatch"}), ("stages", {"stages": (Counts(), Norms())}),
    ("loss_scaler", {"loss_scaler": amp.StaticLossScaler(8.0)}), ("noise_scale", {"noise_scale": GradientNoiseScale()}),
    ("reducer", {"reducer": DataParallel()}),
    ("clip_norm, noise_scale", {"clip_norm": 1.0, "noise_scale": GradientNoiseScale()})])
def test_what_looks_at_whole_gradients_is_refused_where_mindspore_shards(sharding, name, options):
    with pytest.raises(ValueError, match=f"^{name}: .* semi-auto parallel mode"):
        Accumulator(sgd(MLP()), 2, reduction="sum", **options)
    ms.reset_auto_parallel_context()
    Accumulator(sgd(MLP()), 2, reduction="sum", **options)  # negative control


def test_what_does_not_look_at_gradients_is_accepted_where_mindspore_shards(sharding, tmp_path):
    """But a checkpoint would hold what one rank has."""
    network = MLP()
    accumulator = Accumulator(sgd(network), {0: 2}, reduction="sum", stages=(Counts(),))
    path = tmp_path / "run.safetensors"
    with pytest.raises(ValueError, match=r"^MindSpore has cut the parameters into slices.*one file for each rank"):
        save_checkpoint(path, network, accumulator)
    ms.reset_auto_parallel_context()
    save_checkpoint(path, network, accumulator)
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    with pytest.raises(ValueError, match=r"^MindSpore has cut the parameters into slices"):
        load_checkpoint(path, network, accumulator)


def test_buffers_that_mindspore_shards_have_the_dtype_that_was_asked_for(sharding):
    network = MLP()
    accumulator = Accumulator(sgd(network), 2, reduction="sum", buffer_dtype=ms.float16)
    assert {(p.dtype, p.requires_grad) for p in accumulator.window.buffers} == {(ms.float16, False)}
    assert {p.dtype for p in network.trainable_params()} == {ms.float32}


def test_op_by_op_is_refused_where_mindspore_shards(sharding):
    """Nothing would be sharded, and each rank would train alone. The network's weights have no values here yet."""
    network = MLP()
    cell = TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), sgd(network), 2)
    by_hand = Accumulator(sgd(MLP(seed=1)), 2, reduction="sum")
    gradients = tuple(ms.ops.ones(p.shape) for p in by_hand.optimizer.parameters)
    for train in (lambda: by_hand(gradients), lambda: cell(*tensors(*batches([4])[0]))):
        with pytest.raises(ValueError, match=r"^a microbatch ran op by op in .* semi-auto parallel mode"):
            train()
    assert int(by_hand.mini_step) == int(cell.accumulator.mini_step) == 0


def test_train_steps_are_refused_where_mindspore_shards(sharding):
    network = MLP()
    for build in (lambda: make_train_step(mean_loss(network), sgd(network), 2),
                  lambda: make_grad_cache_step(network, network, sgd(network), 2, pieces=2)):
        with pytest.raises(ValueError, match=r"^a train step compiles graphs of its own.*semi-auto parallel"):
            build()


def test_a_train_step_that_was_built_before_is_refused_when_it_would_compile():
    network = MLP()
    train_step, batch = make_train_step(mean_loss(network), sgd(network), 2), tensors(*batches([4])[0])
    before = values(network.trainable_params())
    ms.set_auto_parallel_context(parallel_mode="auto_parallel")
    try:
        with pytest.raises(ValueError, match=r"^a train step compiles graphs of its own.*auto parallel"):
            train_step(*batch)
    finally:
        ms.reset_auto_parallel_context()
    assert int(train_step.accumulator.mini_step) == 0
    train_step(*batch)
    train_step(*batch)
    assert not np.array_equal(values(network.trainable_params())[0], before[0])


# --- networks that train in parallel in a way of their own --------------------------------------------------------


class Wrapped(DistributedDataParallel):
    """MindSpore's wrapper without its reducer, which needs several ranks."""

    def __init__(self, module):
        nn.Cell.__init__(self)
        self.module = module


def hyper(module, **switches):
    """A Cell as HyperParallel's `hsdp` and `fully_shard` leave it, whatever its switches say."""
    module.hsdp_scheduler = SimpleNamespace(**switches)
    return module


@pytest.mark.parametrize("wrap", [Wrapped, lambda cell: hyper(cell, requires_grad_sync=False, requires_acc_grad=False),
                                  lambda cell: hyper(cell, hsdp_state=SimpleNamespace(reduce_grads=False))])
def test_a_network_that_sums_gradients_itself_is_refused(wrap):
    network = MLP()
    wrapped, optimizer = wrap(network), sgd(network)

    def forward_fn(x, y):
        return wrapped(x).mean()

    for build in (lambda: make_train_step(forward_fn, optimizer, 2), lambda: make_train_step(wrapped, optimizer, 2),
                  lambda: make_grad_cache_step(wrapped, nn.Identity(), optimizer, 2, pieces=2),
                  lambda: TrainOneStepCell(nn.SequentialCell(wrapped), optimizer, 2)):
        with pytest.raises(ValueError, match=f"^{type(wrapped).__name__} sums or accumulates gradients itself"):
            build()


# --- several ranks without a reducer ------------------------------------------------------------------------------


def trained(**options):
    network = MLP()
    train_step = make_train_step(mean_loss(network), sgd(network), 2, **options)
    for batch in batches([4, 4, 2, 2, 3]):
        train_step(*tensors(*batch))
    return train_step, values(network.trainable_params())


@pytest.mark.usefixtures("compiled_if_slow")
def test_several_ranks_without_a_reducer_are_warned_of_and_train_as_one_device(several, monkeypatch):
    with pytest.warns(UserWarning, match="^this run has 2 ranks, but this accumulator has no re"):
        train_step, parameters = trained(clip_norm=0.1)
    train_step.accumulator.reset()
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other, expected = trained(clip_norm=0.1)
    other.accumulator.reset()
    for got, wanted in zip(parameters, expected):
        np.testing.assert_array_equal(got, wanted)


def test_several_ranks_that_forgot_init_are_warned_of(monkeypatch):
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    with pytest.warns(UserWarning, match=r"^this run has 2 ranks, .*DataParallel\(\), after .*init\(\)"):
        Accumulator(sgd(MLP()), 2, reduction="sum")


def test_no_warning_where_mindspore_shards(several, sharding):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulator = Accumulator(sgd(MLP()), 2, reduction="sum")
    assert isinstance(accumulator.exchange, Slices)


def test_buffers_are_clones_that_go_with_the_accumulator(several):
    """A parameter lists its clones, and would keep them."""
    optimizer = sgd(MLP())
    infos = [parameter.param_info for parameter in optimizer.parameters]
    state = [len(info.cloned_obj) for info in infos]  # the optimizer's own
    with pytest.warns(UserWarning, match="no reducer"):
        first, second = (Accumulator(optimizer, 2, reduction="sum") for _ in range(2))
    assert [len(info.cloned_obj) for info in infos] == [number + 2 for number in state]
    kept = second.window.buffers
    del first
    gc.collect()
    assert all(info.cloned_obj[-1] is own for info, own in zip(infos, kept))
    assert [len(info.cloned_obj) for info in infos] == [number + 1 for number in state]
    del second, kept
    gc.collect()
    assert [len(info.cloned_obj) for info in infos] == state

"""MindSpore's own parallel modes, and networks that sum gradients themselves: one error. Ranks that train alone."""
import warnings
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.parallel.distributed import DistributedDataParallel
from support.training import sgd

from ms_accum import Accumulator, DataParallel, TrainOneStepCell, make_grad_cache_step, make_train_step
from ms_accum.distributed import parallel_modes
from ms_accum.selftest.comparing import values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.core
SHARDED = (r"shards the network or sums its gradients itself, .* mindspore\.parallel\.nn\.GradAccumulation there, .*"
           r"reducer=DataParallel\(zero=1\)")


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
def test_mindspores_modes_are_refused(mode):
    network = MLP()
    ms.set_auto_parallel_context(parallel_mode=mode)
    try:
        for build in (lambda: Accumulator(sgd(network), 2, reduction="sum"),
                      lambda: make_train_step(mean_loss(network), sgd(network), 2, reducer=DataParallel()),
                      lambda: TrainOneStepCell(network, sgd(network), 2)):
            with pytest.raises(ValueError, match=f"^MindSpore's mode {mode} {SHARDED}"):
                build()
    finally:
        ms.reset_auto_parallel_context()
    Accumulator(sgd(network), 2, reduction="sum")  # negative control


def test_a_first_microbatch_in_such_a_mode_is_refused():
    """`AutoParallel` around a cell sets it only while the cell is compiled."""
    accumulator = Accumulator(sgd(MLP()), 2, reduction="sum")
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    try:
        with pytest.raises(ValueError, match=SHARDED):
            accumulator(accumulator.weights)
    finally:
        ms.reset_auto_parallel_context()
    accumulator.reset()


class Wrapped(DistributedDataParallel):
    """MindSpore's wrapper without its reducer, which needs several ranks."""

    def __init__(self, module):
        nn.Cell.__init__(self)
        self.module = module


def hyper(module):
    """A Cell as HyperParallel's `hsdp` and `fully_shard` leave it."""
    module.hsdp_scheduler = SimpleNamespace()
    return module


@pytest.mark.parametrize("wrap", [Wrapped, AutoParallel, hyper])
def test_a_network_that_shards_or_sums_gradients_itself_is_refused(wrap):
    network = MLP()
    wrapped, optimizer = wrap(network), sgd(network)

    def forward_fn(x, y):
        return wrapped(x).mean()

    for build in (lambda: make_train_step(forward_fn, optimizer, 2), lambda: make_train_step(wrapped, optimizer, 2),
                  lambda: make_grad_cache_step(wrapped, nn.Identity(), optimizer, 2, pieces=2),
                  lambda: TrainOneStepCell(nn.SequentialCell(wrapped), optimizer, 2)):
        with pytest.raises(ValueError, match=f"^{type(wrapped).__name__} {SHARDED}"):
            build()


# --- several ranks without a reducer ------------------------------------------------------------------------------


def trained(**options):
    network = MLP()
    train_step = make_train_step(mean_loss(network), sgd(network), 2, **options)
    for batch in batches([4, 4, 2, 2, 3]):
        train_step(*tensors(*batch))
    train_step.accumulator.reset()
    return values(network.trainable_params())


@pytest.mark.usefixtures("compiled_if_slow")
def test_several_ranks_without_a_reducer_are_warned_of_and_train_as_one_device(monkeypatch):
    monkeypatch.setattr(parallel_modes, "GlobalComm", SimpleNamespace(INITED=True))
    monkeypatch.setattr(parallel_modes, "get_group_size", lambda: 2)
    with pytest.warns(UserWarning, match="^this run has 2 ranks, but this accumulator has no re"):
        parameters = trained(clip_norm=0.1)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = trained(clip_norm=0.1)
    for got, wanted in zip(parameters, expected):
        np.testing.assert_array_equal(got, wanted)


def test_several_ranks_that_forgot_init_are_warned_of(monkeypatch):
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    with pytest.warns(UserWarning, match=r"^this run has 2 ranks, .*DataParallel\(\), after .*init\(\)"):
        Accumulator(sgd(MLP()), 2, reduction="sum")

"""ZeRO on two ranks against the same exchange without it, and what it refuses.

With nodes and with 4 ranks, it is among the drawn runs of `test_exchange.py`.
"""
import re

import numpy as np
import pytest
from mindspore import nn
from support.rank_cases import every
from support.scripts import module
from support.zero_cases import PLAIN, WHOLE

from ms_accum import Accumulator, DataParallel, shard_parameters
from ms_accum.distributed.rows import Rows
from ms_accum.selftest.networks import MLP

pytest_plugins = ["support.launch"]

# FTRL and Adam offload split their work among threads by sizes, which slices have others of.
ROUNDING = 2e-6


@every("zero_runs")
def test_zero_trains_as_without_it(left_by, launch, case):
    """Groups, clipping, token weights, pieces, tied and frozen parameters, skipped windows, loss scales."""
    name = case.split(":")[1]
    for left in left_by(case, launch):
        assert left.keys() == PLAIN.keys()
        for zero, found in left.items():
            where = f"{zero}: {found}"
            assert found["off"] <= (1e-3 if name == "half" else ROUNDING) < 5e-3 < found["moved"], where
            assert found["alike"], where
            assert found["counts"][0] == found["counts"][1], where
            assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-6), where


@pytest.mark.slow
def test_a_users_optimizer_is_saved_as_a_whole(left_by):
    """Its state is found by place. What is not found is refused."""
    for left in left_by("zero_own", "others"):
        said = left.pop("hidden")
        assert re.match(r"ValueError: rank 1 and rank 0 differ in optimizer:first0, optimizer:other0.*; ms_accum finds "
                        "state of slices by its name, which has to end in the parameter's", said), said
        for found in left.values():
            assert found["off"] <= ROUNDING < 1e-2 < found["moved"]


@every("zero_model")
def test_model_and_the_check_take_slices(left_by, launch, case):
    for left in left_by(case, launch):
        assert left.keys() == PLAIN.keys()
        for found in left.values():
            assert found["off"] <= ROUNDING < 1e-2 < found["moved"]
            assert found["ok"] is True


@every("zero_optimizers")
def test_every_elementwise_optimizer(left_by, launch, case):
    """A rank holds half of the state. Control: the parameters have moved."""
    for left in left_by(case, launch):
        assert len(left) >= 25
        assert not set(WHOLE) & set(left)
        for name, found in left.items():
            held, size = found.pop("held")
            assert size / 2 <= held <= size / 2 + 4
            for zero, run in found.items():
                assert run["off"] <= ROUNDING < 1e-3 < run["moved"], (name, zero, run)


@every("zero_defects")
def test_defects_are_seen(left_by, launch, case):
    """Negative controls, at both stages."""
    for rank, left in enumerate(left_by(case, launch)):
        assert len(left) == 10
        for name, off in left.items():
            assert (off <= ROUNDING) if name.startswith("none") else (off > 1e-3), (rank, name, off)


@every("zero_checkpoints")
def test_a_closed_window_goes_on_with_and_without_zero(left_by, launch, case):
    """With the same entries and shapes in the file, but for those of rank 1. From one exchange to the same: the same
    bits."""
    for rank, left in enumerate(left_by(case, launch)):
        entries = [left.pop(f"entries of {zero}", None) for zero in ("zero=0", "zero=1", "zero=2")]
        assert entries[0] == entries[1] == entries[2]
        assert (entries[0] is not None) == (rank == 0)
        assert len(left) == 9
        for name, off in left.items():
            saved, going_on = name.split(" to ")
            together = (saved == "zero=2") != (going_on == "zero=2")
            assert off <= (ROUNDING if together else 0), (name, off)


MAY_LOOK = "ValueError: {} may look at whole parameters, .*; give an elementwise optimizer .* or elementwise=True"
REFUSALS = {
    "whole": r"ValueError: zero=1 with an optimizer of whole parameters; build it from shard_parameters\(",
    "no zero": r"ValueError: the optimizer updates this rank's slices, which zero=0 does not gather; give DataParallel",
    "no reducer": r"ValueError: the optimizer updates this rank's slices, but there is no reducer to gather them; give",
    "some": r"ValueError: first\.bias is not a slice, but other parameters of the optimizer are slices; give all",
    "Lamb": MAY_LOOK.format("Lamb"), "AdaFactor": MAY_LOOK.format("AdaFactor"), "LARS": MAY_LOOK.format("LARS"),
    "centralized": MAY_LOOK.format("Adam with grad_centralization=True"), "own": MAY_LOOK.format("Sign"),
    "one in a node": "zero=2 divides no buffers if each node has one rank; give zero=1",
    "stage": r"ValueError: Measuring looks at the gradients of a window, .*; sum over elements by self\.exchange",
    "twice": r"ValueError: first\.weight is already a slice; call shard_parameters only once, with the network's",
    "float": r"TypeError: an entry of parameters is of type float, expected a Parameter, or a group as a dict; give",
    "whole gradients": r"ValueError: the gradient of first\.weight has shape \(15,\), expected \(5, 6\); .* with ZeRO",
    "accepted": "accepted"}


def test_what_does_not_fit_is_refused_on_all_ranks(left_by):
    """An elementwise optimizer of a user is accepted if it is declared."""
    for said in left_by("zero_refusals"):
        assert said.keys() == REFUSALS.keys()
        for name, message in REFUSALS.items():
            assert re.match(message, said[name]), said[name]


def test_an_update_that_stops_before_the_gather_is_found(left_by):
    for said in left_by("zero_interrupted"):
        assert said.startswith("RuntimeError: an error or an interrupt stopped an update, so it may have changed")


def test_on_one_device_nothing_is_cut():
    parameters = MLP().trainable_params()
    assert shard_parameters(parameters) is parameters
    optimizer = nn.SGD(shard_parameters(parameters), 0.1)
    accumulator = Accumulator(optimizer, 2, reduction="sum", reducer=DataParallel(zero=1))
    assert list(accumulator.weights) == parameters
    assert not accumulator.exchange.divides_parameters


def digits():
    """A network with the layers of MindSpore's tutorial."""
    return nn.SequentialCell(nn.Dense(784, 512), nn.Dense(512, 512), nn.Dense(512, 10))


def language_model():
    return module("lm", "network").Network(0)


@pytest.mark.parametrize("network", [language_model, digits])
def test_a_window_sends_what_an_all_reduce_sends(network):
    """ReduceScatter and AllGather of a ring send half of an AllReduce each: what they add is padding."""
    parameters = network().trainable_params()
    rows = Rows(parameters, tuple(p.dtype for p in parameters), 2**20, 8)
    whole = sum(p.size for p in parameters)
    assert whole <= 8 * sum(rows.lengths) <= 1.05 * whole


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_rows_hold_each_parameter_once(ranks):
    """Laid out and put together again: the same arrays, and each rank the slices that NumPy cuts."""
    parameters = MLP().trainable_params()
    rows = Rows(parameters, tuple(p.dtype for p in parameters), 80, ranks)
    assert len(rows.members) > 1
    laid = [rows.laid_out([parameters[i] for i in members], members).reshape(ranks, -1) for members in rows.members]
    for members, bucket in zip(rows.members, laid):
        for i, whole in zip(members, rows.wholes(bucket, members)):
            np.testing.assert_array_equal(whole.asnumpy(), parameters[i].asnumpy())
    for rank in range(ranks):
        for parameter, part in zip(parameters, rows.slices(tuple(bucket[rank] for bucket in laid))):
            width = -(-parameter.size // ranks)
            flat = np.pad(parameter.asnumpy().ravel(), (0, width * ranks - parameter.size))
            np.testing.assert_array_equal(part.asnumpy(), flat[rank * width:(rank + 1) * width])

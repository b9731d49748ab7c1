"""Windows in which nobody has a token: counted in any case, dropped where windows may be dropped."""
import warnings

import numpy as np
import pytest
from mindspore import Tensor, amp, nn
from support.modes import compiled, running
from support.rank_cases import every

from ms_accum import (
    Accumulator,
    TrainOneStepCell,
    load_checkpoint,
    make_train_step,
    save_checkpoint,
    until_weight,
)
from ms_accum.checkpoint import checkpoint as checkpoints
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, TargetLoss, targets

pytest_plugins = ["support.launch"]
X = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
NOTHING = X, np.full(6, -100, np.int32)
TOKENS = X, np.array([0, -100, 1, 0, -100, 1], np.int32)
SKIPS = {"skip_window": {"on_nonfinite": "skip_window"}, "skip_microbatch": {"on_nonfinite": "skip_microbatch"},
         "scaler": {"loss_scaler": amp.StaticLossScaler}}


def built(kind, accumulate_step=2, loss_reduction="mean", **options):
    loss = TargetLoss(MLP(), loss_reduction)
    optimizer = nn.AdamWeightDecay(loss.trainable_params(), 0.1, weight_decay=0.1)
    options |= {"loss_scaler": amp.StaticLossScaler(8.0)} if "loss_scaler" in options else {}
    if kind == "cell":
        return TrainOneStepCell(loss, optimizer, accumulate_step, weight_fn=targets, loss_reduction=loss_reduction,
                                **options)
    if kind == "hand":
        return Accumulator(optimizer, accumulate_step, reduction="mean", **options)
    return make_train_step(loss, optimizer, accumulate_step, weight_fn=targets, loss_reduction=loss_reduction,
                           **options)


def trained(kind, data, mode, flush=True, **options):
    """Parameters and counters after microbatches and a flush."""
    with running({"cell": "graph"}.get(kind, "jit") if mode == "jit" else mode):
        step = built(kind, eager=mode == "pynative", **options) if kind == "step" else built(kind, **options)
        for _ in step.epoch(data) if kind == "step" else ():
            pass
        for batch in data if kind == "cell" else ():
            step(*map(Tensor, batch))
        if kind == "hand":
            by_hand(step, data, mode)
        if flush:
            step.flush()
        status = step.status()
    return values(step.accumulator.weights if kind != "hand" else step.weights), status


def by_hand(accumulator, data, mode):
    def step(weight, *gradients):
        return accumulator(gradients, weight)

    step = compiled(step, mode)
    for x, y in data:
        step(Tensor(float((y != -100).sum())), *[p * 0 + float(x.sum()) for p in accumulator.weights])


CASES = [("step", {}), ("cell", {}), ("hand", {}), ("step", {"pieces": 2}), ("step", {"loss_reduction": "sum"}),
         ("step", {"accumulate_step": until_weight(5, at_most=2)})]


@pytest.mark.parametrize(("policy", "kind", "options", "mode"), [
    *((list(SKIPS)[i % 3], *case, "pynative") for i, case in enumerate(CASES)),
    *(pytest.param(list(SKIPS)[i % 3], *case, "jit", marks=pytest.mark.slow) for i, case in enumerate(CASES))])
def test_a_window_without_tokens_is_dropped_where_windows_may_be(policy, kind, options, mode):
    """The run equals one without these windows. Control: with "apply", AdamW moves parameters in them."""
    if kind == "hand" and policy == "scaler":
        options = {**options, "clip_norm": 1.0}
    data = [TOKENS] * 2 + [NOTHING] * 2 + [TOKENS, NOTHING]
    skips = SKIPS[policy]
    got, status = trained(kind, data, mode, **options, **skips)
    expected, other = trained(kind, data[:2] + data[4:], mode, **options, **skips)
    assert difference(got, expected) == 0
    assert (status.update_step, status.closed_windows, status.skipped, status.empty_windows) == (2, 3, 1, 1)
    assert (other.update_step, other.empty_windows, other.skipped) == (2, 0, 0)
    applied, status = trained(kind, data, mode, **options)
    assert (status.update_step, status.closed_windows, status.skipped, status.empty_windows) == (3, 3, 0, 1)
    assert difference(applied, got) > 1e-3


@pytest.mark.usefixtures("compiled_if_slow")
@pytest.mark.parametrize("accumulate_step", [1, 2])
def test_a_single_microbatch_and_an_incomplete_window_are_windows_too(accumulate_step):
    """Also one without samples. A flush that finds no microbatch closes nothing."""
    for options, skipped in (({}, 0), ({"on_nonfinite": "skip_window"}, 1)):
        step = built("step", accumulate_step, **options)
        list(step.epoch([tuple(part[:0] for part in TOKENS)]))
        status = step.status()
        assert (status.update_step, status.skipped, status.empty_windows) == (1 - skipped, skipped, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert step.flush() is step.flush() is False
        assert step.status()[:7] == status[:7]


@pytest.mark.usefixtures("compiled_if_slow")
def test_many_in_a_row_end_a_run_with_max_skips():
    step = built("step", 1, on_nonfinite="skip_window", max_skips=2)
    step(*NOTHING)
    step(*NOTHING)
    with pytest.raises(RuntimeError, match=r"max_skips=2 windows in .* not finite or windows had the weight 0, after"):
        step(*NOTHING)
    assert step.status().skipped_in_row == 3


@pytest.mark.usefixtures("compiled_if_slow")
def test_the_count_goes_on_in_a_checkpoint_and_an_older_file_has_none(monkeypatch):
    """Control: another entry that is missing is refused."""
    network = MLP()
    loss, optimizer = TargetLoss(network), nn.SGD(network.trainable_params(), 0.1)
    step = make_train_step(loss, optimizer, 1, weight_fn=targets)
    step(*NOTHING)
    save_checkpoint("c.safetensors", network, step)
    other = make_train_step(loss, optimizer, 1, weight_fn=targets)
    load_checkpoint("c.safetensors", network, other)
    assert other.status().empty_windows == 1
    other(*NOTHING)
    assert other.status().empty_windows == 2
    read = checkpoints.read_file

    def without(name):
        def read_older(*arguments):
            entries, about = read(*arguments)
            return {key: entry for key, entry in entries.items() if key != f"accumulator:{name}"}, about

        return read_older

    monkeypatch.setattr(checkpoints, "read_file", without("empty_windows"))
    load_checkpoint("c.safetensors", network, other)
    assert (other.status().closed_windows, other.status().empty_windows) == (1, 0)
    monkeypatch.setattr(checkpoints, "read_file", without("skipped"))
    with pytest.raises(checkpoints.CheckpointError, match="skipped is missing in the file"):
        load_checkpoint("c.safetensors", network, other)


@every("empty")
def test_the_tokens_of_all_ranks_count(left_by, launch, case):
    """Windows: tokens on rank 1 only; on no rank; on rank 0 only, whose rank 1 has run out of data (a flush)."""
    for result in left_by(case, launch):
        for name, (update_step, skipped, empty, moved) in result.items():
            drops = not name.endswith("apply")
            assert (update_step, skipped, empty) == (3 - drops, int(drops), 1), name
            assert (moved == 0) == drops, name

"""Windows in which nobody has a token: counted and warned of in any case, dropped where windows may be dropped."""
import warnings

import numpy as np
import pytest
from mindspore import Tensor, amp, nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model
from support.modes import compiled, recorded_warnings, running
from support.rank_cases import every

from ms_accum import (
    Accumulator,
    FlushCallback,
    TrainOneStepCell,
    WindowLog,
    load_checkpoint,
    make_train_step,
    save_checkpoint,
    until_weight,
)
from ms_accum.checkpoint import checkpoint as checkpoints
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, TargetLoss, targets
from ms_accum.selftest.reads import counted_reads

pytest_plugins = ["support.launch"]
X = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
NOTHING = X, np.full(6, -100, np.int32)
TOKENS = X, np.array([0, -100, 1, 0, -100, 1], np.int32)
WARNS = r"^1 of \d closed windows had the weight 0, so there was nothing to learn from: they "
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

    def pair(x, y):
        return loss(x, y), loss(x, y)

    def counts(x, y):
        return targets(x, y), targets(x, y)

    several = "losses" in options
    return make_train_step(pair if several else loss, optimizer, accumulate_step,
                           weight_fn=counts if several else targets, loss_reduction=loss_reduction, **options)


def trained(kind, data, mode, flush=True, **options):
    """Parameters, counters and warnings after microbatches and a flush."""
    with running({"cell": "graph"}.get(kind, "jit") if mode == "jit" else mode):
        step = built(kind, eager=mode == "pynative", **options) if kind == "step" else built(kind, **options)
        with recorded_warnings() as caught:
            for _ in step.epoch(data) if kind == "step" else ():
                pass
            for batch in data if kind == "cell" else ():
                step(*map(Tensor, batch))
            if kind == "hand":
                by_hand(step, data, mode)
            if flush:
                step.flush()
            status = step.status()
    said = [str(warning.message) for warning in caught if "weight 0" in str(warning.message)]
    return values(step.accumulator.weights if kind != "hand" else step.weights), status, said


def by_hand(accumulator, data, mode):
    def step(weight, *gradients):
        return accumulator(gradients, weight)

    step = compiled(step, mode)
    for x, y in data:
        step(Tensor(float((y != -100).sum())), *[p * 0 + float(x.sum()) for p in accumulator.weights])


CASES = [("step", {}), ("cell", {}), ("hand", {}), ("step", {"pieces": 2}), ("step", {"loss_reduction": "sum"}),
         ("step", {"losses": 2}), ("step", {"accumulate_step": until_weight(5, at_most=2)})]


@pytest.mark.parametrize(("policy", "kind", "options", "mode"), [
    *((list(SKIPS)[i % 3], *case, "pynative") for i, case in enumerate(CASES)),
    *(pytest.param(list(SKIPS)[i % 3], *case, "jit", marks=pytest.mark.slow) for i, case in enumerate(CASES))])
def test_a_window_without_tokens_is_dropped_where_windows_may_be(policy, kind, options, mode):
    """The run equals one without these windows. Control: with "apply", AdamW moves parameters in them."""
    if kind == "hand" and policy == "scaler":
        options = {**options, "clip_norm": 1.0}
    data = [TOKENS] * 2 + [NOTHING] * 2 + [TOKENS, NOTHING]
    skips = SKIPS[policy]
    got, status, said = trained(kind, data, mode, **options, **skips)
    expected, other, nothing = trained(kind, data[:2] + data[4:], mode, **options, **skips)
    assert difference(got, expected) == 0
    assert (status.update_step, status.closed_windows, status.skipped, status.empty_windows) == (2, 3, 1, 1)
    assert (other.update_step, other.empty_windows, other.skipped, nothing) == (2, 0, 0, [])
    assert len(said) == 1
    assert "they were dropped" in said[0]
    applied, status, said = trained(kind, data, mode, **options)
    assert (status.update_step, status.closed_windows, status.skipped, status.empty_windows) == (3, 3, 0, 1)
    assert len(said) == 1
    assert 'on_nonfinite="skip_window" drops such windows' in said[0]
    assert difference(applied, got) > 1e-3


@pytest.mark.usefixtures("compiled_if_slow")
@pytest.mark.parametrize("accumulate_step", [1, 2])
def test_a_single_microbatch_and_an_incomplete_window_are_windows_too(accumulate_step):
    """Also one without samples. A flush that finds no microbatch closes nothing."""
    for options, skipped in (({}, 0), ({"on_nonfinite": "skip_window"}, 1)):
        step = built("step", accumulate_step, **options)
        with pytest.warns(UserWarning, match=WARNS):
            list(step.epoch([tuple(part[:0] for part in TOKENS)]))
        status = step.status()
        assert (status.update_step, status.skipped, status.empty_windows) == (1 - skipped, skipped, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert step.flush() is step.flush() is False
        assert step.status()[:7] == status[:7]


@pytest.mark.parametrize("options", [
    {"on_nonfinite": "skip_window"},
    *(pytest.param(one, marks=pytest.mark.slow) for one in ({}, {"on_nonfinite": "skip_microbatch"}))])
def test_the_first_is_warned_of_once_where_the_host_reads(options):
    """With as many reads as windows with tokens need: none, or one each, where windows may be dropped."""
    step, reads = built("step", 1, **options), []
    with recorded_warnings() as caught:
        for data in ([TOKENS, NOTHING], [TOKENS] * 8, [NOTHING] * 8):  # the first compiles, which reads
            step(*TOKENS)
            with counted_reads() as made:
                for batch in data:
                    step(*batch)
            reads.append(len(made))
            step.flush()
    assert reads[1:] == [8 * bool(options)] * 2
    said, = [str(warning.message) for warning in caught]
    assert said.startswith("1 of 3 closed windows")
    assert step.status().empty_windows == 9


@pytest.mark.parametrize("mode", ["pynative", pytest.param("graph", marks=pytest.mark.slow)])
def test_a_log_and_a_model_warn(mode):
    """Of a window in the middle of the epoch (the log, which reads at each microbatch), and of the last one."""
    rows = []
    for log, data in ((True, [NOTHING, TOKENS]), (False, [TOKENS, NOTHING])):
        with running(mode):
            model = Model(built("cell", 1))
            dataset = GeneratorDataset(data, ["x", "y"], shuffle=False)
            callbacks = [FlushCallback(), *([WindowLog(rows.append)] if log else [])]
            with pytest.warns(UserWarning, match=WARNS):
                model.train(1, dataset, callbacks=callbacks, dataset_sink_mode=False)
    assert [row["weight"] for row in rows] == [0.0, 4.0]


@pytest.mark.usefixtures("compiled_if_slow")
def test_many_in_a_row_end_a_run_with_max_skips():
    step = built("step", 1, on_nonfinite="skip_window", max_skips=2)
    with pytest.warns(UserWarning, match=WARNS):
        step(*NOTHING)
    step(*NOTHING)
    with pytest.raises(RuntimeError, match=r"max_skips=2 windows in .* not finite or windows had the weight 0, after"):
        step(*NOTHING)
    assert step.status().skipped_in_row == 3


@pytest.mark.usefixtures("compiled_if_slow")
def test_the_count_goes_on_in_a_checkpoint_and_an_older_file_has_none(monkeypatch):
    """What the saved run had is not warned of again. Control: another entry that is missing is refused."""
    network = MLP()
    loss, optimizer = TargetLoss(network), nn.SGD(network.trainable_params(), 0.1)
    step = make_train_step(loss, optimizer, 1, weight_fn=targets)
    step(*NOTHING)
    with pytest.warns(UserWarning, match=WARNS):
        step.status()
    save_checkpoint("c.safetensors", network, step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = make_train_step(loss, optimizer, 1, weight_fn=targets)
        load_checkpoint("c.safetensors", network, other)
        assert other.status().empty_windows == 1
    other(*NOTHING)
    with pytest.warns(UserWarning, match="^2 of 2 closed"):
        other.status()
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

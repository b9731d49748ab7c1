"""strategy="split": graphs without control flow, and a host that cannot get out of step with the device."""
import os
import re
from itertools import product
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from conftest import MLP, batches, difference, mean_loss, tensors, values
from following import LOSS, op_by_op
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from mindspore import Tensor, amp, nn, ops
from pair import Pair, gradients_of, tensors_of

from ms_accum import (
    Accumulator,
    GradientNoiseScale,
    LocalUpdates,
    load_checkpoint,
    make_train_step,
    save_checkpoint,
    straight,
    until_weight,
)

# --- no control flow ---------------------------------------------------------------------------------------------------


def masked_loss(network, losses):
    def forward_fn(x, y):
        return LOSS(network(x), y), network(x)

    def both(x, y):
        return (LOSS(network(x), y), ops.square(network(x)).mean()), network(x)

    return forward_fn if losses == 1 else both


def unmasked(x, y):
    return (y >= 0).sum()


def of_both(x, y):
    return (y >= 0).sum(), (y > 0).sum()


def graphs_of(strategy, micro_size, weight_fn, loss_scaler, on_nonfinite, steps, measured, losses=1, reducer=None):
    """Train on five microbatches; return the text of each graph that was compiled."""
    seen = set(Path("ir").glob("*_validate_*.ir"))
    network = MLP()
    accumulator = Accumulator(nn.Momentum(network.trainable_params(), 0.1, 0.9), steps, 1.0 if measured else None,
                              reduction="mean", on_nonfinite=on_nonfinite,
                              noise_scale=GradientNoiseScale(0.9) if measured and losses == 1 else None, losses=losses,
                              reducer=reducer)
    train_step = make_train_step(masked_loss(network, losses), accumulator, micro_size=micro_size, weight_fn=weight_fn,
                                 loss_scaler=amp.DynamicLossScaler(2.0**8, 2, 2) if loss_scaler else None, strategy=strategy,
                                 has_aux=True)
    data = [tensors(x, y) for x, y in batches([6] * 5)]
    run = train_step.epoch(data, lookahead=losses > 1 and micro_size > 1)
    if reducer is not None:  # a flush would wait for other ranks in a loop
        run = (train_step(*batch) for batch in data)
    for _ in run:
        pass
    assert int(accumulator.update_step) == (3 if reducer is None else 2)
    return [file.read_text(encoding="utf-8") for file in set(Path("ir").glob("*_validate_*.ir")) - seen]


def control_flow(graph):
    return set(re.findall(r"= (?:PrimFunc_)?(Switch|Partial|Call|SwitchLayer)\(|= %\d+\((?=\[CNode\])", graph))


# What changes the graphs: micro_size, weight_fn, a loss scaler, on_nonfinite, the schedule, and whether norms are measured.
COMBINATIONS = [options for options in product(
    (1, 4), (None, unmasked), (False, True), ("apply", "skip_window", "skip_microbatch"), (2, {0: 1, 1: 2}), (False, True))
    if not (options[2] and options[3] == "skip_microbatch")]
# Whole microbatches of two losses; in pieces, and weighed before.
COMBINATIONS += [(1, of_both, False, "apply", 2, False, 2), (4, of_both, True, "skip_window", 2, True, 2)]
LOCAL = (1, None, False, "apply", 2, False, 1, LocalUpdates(2))  # what ranks exchange after their updates


@pytest.mark.fresh_process("jit")
@pytest.mark.parametrize(("mode", "stride"), [("jit", 27), pytest.param("jit", 1, marks=pytest.mark.slow)])
def test_the_graphs_of_split_hold_no_control_flow(mode, stride, monkeypatch):
    """Without the branch that CPU gets. The controls: fused has a Switch, and so has split with that branch."""
    os.environ.update(MS_DEV_SAVE_GRAPHS="1", MS_DEV_SAVE_GRAPHS_PATH=str(Path("ir").absolute()))
    with monkeypatch.context() as patch:
        patch.setattr(straight, "needs_branch", lambda: False)
        for options in (*COMBINATIONS[::stride], LOCAL):
            graphs = graphs_of("split", *options)
            assert len(graphs) >= 2
            assert not any(map(control_flow, graphs)), options
    for strategy in ("fused", "split"):
        assert any("Switch" in control_flow(graph) for graph in graphs_of(strategy, *COMBINATIONS[0]))


# --- host and device agree -----------------------------------------------------------------------------------------------


class Scheduled(Pair):
    """A Pair with two train steps, whose losses have given gradients."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        weights = self.weights

        def forward_fn(weight, *gradients):
            total = 0.0
            for parameter, gradient in zip(weights, gradients):
                total = total + (parameter * gradient).sum()
            return total

        def weight_fn(weight, *gradients):
            return weight

        self.steps = {strategy: make_train_step(forward_fn, self.ours, strategy=strategy, weight_fn=weight_fn)
                      for strategy in ("split", "fused")}

    def train(self, strategy, seed, weight, bad=None):
        gradients, step = gradients_of(seed, bad), self.steps[strategy]
        step(Tensor([weight], ms.float32), *tensors_of(gradients))
        self.check("__call__", step.updated, gradients, weight)


class AnySchedule(RuleBasedStateMachine):
    """Calls of a train step that the host schedules, and whatever may change the window behind its back."""

    @initialize(accumulate_step=st.sampled_from([1, 2, 3, {0: 2, 1: 1, 2: 4}, until_weight(3.5, at_most=4)]),
                clip_norm=st.sampled_from([None, 2.0]),
                on_nonfinite=st.sampled_from(["apply", "skip_microbatch", "skip_window"]))
    def build(self, **options):
        self.pair = Scheduled(reduction="mean", optimizer="momentum", **options)

    @rule(seed=st.integers(0, 99), weight=st.sampled_from([1.0, 0.5, 3.0, 0.0]))
    def train(self, seed, weight):
        self.pair.train("split", seed, weight)

    @precondition(lambda self: self.pair.oracle.on_nonfinite != "apply")
    @rule(seed=st.integers(0, 99), bad=st.sampled_from([np.nan, np.inf]))
    def train_on_nan(self, seed, bad):
        self.pair.train("split", seed, 1.0, bad)

    @rule(seed=st.integers(0, 99))
    def train_fused(self, seed):
        self.pair.train("fused", seed, 1.0)

    @rule(seed=st.integers(0, 99), method=st.sampled_from(["__call__", "add"]))
    def by_hand(self, seed, method):
        self.pair.microbatch(method, gradients_of(seed), 1.0, 1.0)

    @rule(method=st.sampled_from(["apply", "flush", "reset"]))
    def close_by_hand(self, method):
        self.pair.close(method)

    @rule(strategy=st.sampled_from(["split", "fused"]))
    def flush(self, strategy):
        self.pair.check("flush", self.pair.steps[strategy].flush())


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_whatever_is_called_between_them_train_steps_follow_the_oracle(count):
    with op_by_op():
        run_state_machine_as_test(AnySchedule, settings=settings(
            max_examples=count, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]))


@pytest.mark.parametrize(("accumulate_step", "on_nonfinite"), [
    ({0: 2, 3: 1, 6: 3}, "apply"), (until_weight(3.5, at_most=4), "skip_microbatch"), ({0: 2, 3: 1, 6: 3}, "skip_window")])
def test_compiled_train_steps_follow_the_oracle_between_calls_by_hand(accumulate_step, on_nonfinite):
    pair = Scheduled(accumulate_step, "mean", 2.0, on_nonfinite, "momentum")
    rng, met = np.random.default_rng(5), set()
    for i in range(200):
        what = rng.choice(["split", "fused", "__call__", "add", "apply", "flush", "reset", "step.flush"],
                          p=[0.55, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05, 0.05])
        met.add((what, pair.oracle.mini_step > 0))
        if what in ("split", "fused"):
            bad = np.nan if on_nonfinite != "apply" and rng.random() < 0.15 else None
            pair.train(what, i, float(rng.choice([0.0, 0.5, 1.0, 3.0])), bad)
        elif what in ("__call__", "add"):
            pair.microbatch(what, gradients_of(i), 1.0, 1.0)
        elif what == "step.flush":
            pair.check("flush", pair.steps[("split", "fused")[i % 2]].flush())
        else:
            pair.close(what)
    assert len(met) == 16
    assert pair.oracle.update_step > 20


@pytest.mark.parametrize(("late", "on_nonfinite", "goes_on"), [
    (False, "apply", "split"), (True, "apply", "split"), (False, "apply", "budget"), (False, "skip_window", "split"),
    (True, "skip_window", "fused"),
    (False, "apply", "fused"), (False, "apply", "saved")])
def test_an_interrupt_between_two_graphs_changes_no_window(late, on_nonfinite, goes_on, monkeypatch, tmp_path):
    pair = Scheduled(until_weight(2) if goes_on == "budget" else 2, "mean", None, on_nonfinite, "momentum")
    step = pair.steps["split"]
    pair.train("split", 1, 1.0)
    apply = step._apply

    def interrupted():
        if late:
            apply()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(step, "_apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(Tensor([1.0]), *tensors_of(gradients_of(2)))
    assert int(pair.ours.mini_step) == (0 if late else 2)
    assert pair.oracle(gradients_of(2), 1.0)  # what is made up for before anything is added or saved
    if goes_on == "saved":
        network = nn.Cell()
        network.weights = pair.weights
        save_checkpoint(tmp_path / "closed.ckpt", network, pair.ours)
        assert int(pair.ours.mini_step) == 0
    pair.train("fused" if goes_on == "fused" else "split", 3, 1.0)
    pair.train("split", 4, 1.0)
    assert int(pair.ours.update_step) == 2


@pytest.mark.parametrize("by_hand", ["add", "reset"])
def test_a_compiled_call_of_the_accumulator_is_an_error_at_the_boundary(by_hand):
    pair = Scheduled(3, "mean", None, "apply", "momentum")
    step = pair.steps["split"]

    @ms.jit
    def hidden(*gradients):
        if by_hand == "add":
            pair.ours.add(gradients, 1.0)
        else:
            pair.ours.reset()
        return pair.ours.mini_step + 0

    hidden(*tensors_of(gradients_of(0)))  # the host knows of the first call, for it is compiled then
    pair.ours.reset()
    batch = Tensor([1.0]), *tensors_of(gradients_of(1))
    before = values(pair.weights)
    step(*batch)
    hidden(*tensors_of(gradients_of(0)))
    step(*batch)
    counted = {"add": 4, "reset": 2}[by_hand]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"holds {counted} microbatches after 0 updates, expected 3 after 0; it was"):
            step(*batch)
    assert difference(values(pair.weights), before) == 0
    pair.ours.reset()
    for _ in range(2):  # the same count as one of the refused, but by hand
        pair.microbatch("add", gradients_of(5), 1.0, 1.0)
    pair.train("split", 6, 1.0)
    assert int(pair.ours.update_step) == 1


def test_a_compiled_call_that_closes_a_window_is_an_error_at_the_boundary():
    """The device has as many microbatches in the window as the host counted, but of another window."""
    pair = Scheduled(2, "mean", None, "apply", "momentum")
    hidden, step, batch = ms.jit(pair.ask["__call__"]), pair.steps["split"], (Tensor([1.0]), *tensors_of(gradients_of(1)))
    for _ in range(2):
        hidden(Tensor(1.0), *tensors_of(gradients_of(0)))  # the first call is noticed: it is compiled then
    step(*batch)
    for _ in range(2):
        hidden(Tensor(1.0), *tensors_of(gradients_of(0)))
    with pytest.raises(RuntimeError, match="holds 2 microbatches after 2 updates, expected 2 after 1; it was not applied"):
        step(*batch)
    assert step.flush()
    step(*batch)


def test_a_loaded_window_is_counted_on(tmp_path):
    """Saved after one of three microbatches, loaded after two others: the next but one closes the window."""
    network = MLP()
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 3, reduction="mean")
    train_step = make_train_step(mean_loss(network), accumulator)
    updated = []
    for i, (x, y) in enumerate(batches([4] * 6)):
        train_step(*tensors(x, y))
        updated.append(bool(train_step.updated))
        if i == 0:
            save_checkpoint(tmp_path / "open.ckpt", network, accumulator)
        if i == 1:
            load_checkpoint(tmp_path / "open.ckpt", network, accumulator)
    assert updated == [False, False, False, True, False, False]
    assert int(accumulator.mini_step) == 2

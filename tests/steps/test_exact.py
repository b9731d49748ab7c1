"""Drawn runs of a train step against an oracle in NumPy: windows, weights, pieces, sums, clipping, skipping, a stage of
a user's own, resets, and runs that another one goes on with."""
import random
from itertools import combinations, islice
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from support import reference
from support.modes import recorded_warnings, running

from ms_accum import Stage, load_checkpoint, make_train_step, save_checkpoint, until_weight
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP
from ms_accum.tensors import as_tensor

pytestmark = pytest.mark.core
RATE = 0.25


def drawn(seed):
    """What is trained: microbatches of (x, y, mask), some of them empty, without a token, or NaN.

    A mask holds what each sample weighs; 0 takes it out of the loss. After `reset_at`, the step is reset; after `stop`
    microbatches, another run goes on with a file. `eager`: where nothing is compiled; then weights may be numbers.
    """
    choose, rng = random.Random(seed), np.random.default_rng(seed)
    kind = choose.choice(["samples", "tokens", "returned", "sum", "returned sum", "objects"])
    policy = choose.choice(["apply", "apply", "skip_window", "skip_microbatch", "scaled"])
    sizes = [choose.choice([6, 6, 4, 1, 5, 0]) for _ in range(9)]
    data = [(rng.normal(size=(n, 6)), rng.integers(0, 3, n),
             (rng.random(n) < choose.choice([0, 0.6, 0.6, 1])) * choose.choice([1.0, 1.0, 1.5, 2.75])) for n in sizes]
    nan = choose.choice([0, 2]) if policy != "apply" else None
    for place in [i for i, n in enumerate(sizes) if n][1::4] if nan is not None else ():
        data[place][2][:] = 1.0
        data[place][nan][:] = np.nan
    return SimpleNamespace(
        kind=kind, policy=policy, nan=nan, data=data, pieces=choose.choice([1, 1, 2, 3, 7]),
        axis=choose.choice([0, 0, 1]), length=choose.choice([1, 2, 4, {0: 1, 2: 3}, until_weight(9.0, at_most=4)]),
        clip_norm=choose.choice([None, 0.05, float("inf")]), by_name=choose.random() < 0.5,
        min_weight=choose.choice([None, None, 4.0, 12.0]), watches=choose.choice([0, 0, 0, 1, 2]),
        reset_at=choose.choice([None, None, 0, 4]), stop=choose.choice([None, None, 2, 6]),
        eager=choose.random() < 0.5, numbers=nan != 2 and choose.random() < 0.5)


def together(count, among=100):
    """Seeds of runs in which most pairs of options occur."""
    pairs = {seed: {*combinations(sorted((name, str(value)) for name, value in vars(drawn(seed)).items()
                                         if name != "data"), 2)} for seed in range(among)}
    seeds, found = [], set()
    while len(seeds) < count:
        seeds.append(max(pairs, key=lambda seed: len(pairs[seed] - found)))
        found |= pairs[seeds[-1]]
    return seeds


def pieces_of(case, x, y, mask):
    """The pieces of a microbatch: their weight, and the parts of their sums: a factor, and samples.

    With "objects", samples that are masked out count, too, as the background does in a detector.
    """
    rows = max(-(-len(x) // case.pieces), 1)
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        weights = np.ones(len(y[part])) if case.kind == "samples" else mask[part]
        kept, factor = weights != 0, 1.0 if is_sum(case) else weights.max()
        background = [(0.5 * (case.kind == "objects"), x[part], y[part])] * is_sum(case)  # a sum of 0 * NaN is NaN
        yield weights.sum(), [(factor, x[part][kept], y[part][kept]), *background]


def is_sum(case):
    return case.kind in ("sum", "returned sum", "objects")


def sums_of(parameters, parts):
    """The loss and the gradient of a piece."""
    loss, gradient = 0.0, [0 * p for p in parameters]
    for factor, x, y in parts:
        if len(x):
            one, of_one = reference.loss_and_gradients(parameters, x, y)
            loss += factor * len(x) * one
            gradient = [g + factor * len(x) * h for g, h in zip(gradient, of_one)]
    return loss, gradient


def oracle(case, weigh=True, flushes=True):
    """The parameters, the losses, and what is counted. `weigh`: False takes a mean of means."""
    parameters = [np.array(p, np.float64) for p in values(MLP().trainable_params())]
    n = SimpleNamespace(update_step=0, closed_windows=0, skipped=0, skipped_in_row=0, empty_windows=0, seen=0,
                        loss=0.0, weight=0, grad_norm=np.nan, weights=np.nan, spread=np.nan, squares=np.nan)
    losses, window, held, least = [], [], 0, case.min_weight or 0

    def close():
        nonlocal parameters, held
        taken = [one for one in window if not one[3]]
        n.weight = sum(weight for weight, *_ in taken)
        divisor = max(n.weight, least) if weigh else len(taken)
        gradient = [sum([g[i] / (divisor * (1 if weigh else weight)) for weight, _, g, _ in taken if divisor], 0 * p)
                    for i, p in enumerate(parameters)]
        n.loss = sum(loss for _, loss, *_ in taken) / divisor if divisor else 0.0
        dropped = case.policy != "apply" and (not (taken if least else n.weight)
                                              or not all(np.isfinite(g).all() for g in gradient))
        norm = np.sqrt(sum((g**2).sum() for g in gradient))
        n.grad_norm = np.nan if case.clip_norm is None else norm
        if not dropped:
            factor = 1 if case.clip_norm is None else min(1, case.clip_norm / (norm + 1e-6))
            parameters = [p - RATE * factor * g for p, g in zip(parameters, gradient)]
            n.seen += n.weight
            if case.watches:
                n.squares = ((gradient[-1] * divisor / (n.weight or np.nan))**2).sum()
                n.weights = case.watches * n.weight
                n.spread = sum((g[-1]**2).sum() / weight for weight, _, g, _ in taken if weight)
        n.skipped += max(sum(skipped for *_, skipped in window), int(dropped))
        n.update_step, n.closed_windows = n.update_step + (not dropped), n.closed_windows + 1
        n.skipped_in_row, n.empty_windows = (n.skipped_in_row + 1) * dropped, n.empty_windows + (n.weight == 0)
        window.clear()
        held = 0

    for i, batch in enumerate(case.data):
        found = []
        for weight, parts in pieces_of(case, *batch):
            loss, gradient = sums_of(parameters, parts)
            found.append((weight, loss, gradient, case.policy == "skip_microbatch" and np.isnan(loss + weight)))
        divisor = max(sum(weight for weight, *_ in found), least)
        losses.append(sum(loss for _, loss, *_ in found) / divisor if divisor else 0.0)
        window += found
        held += 1
        length = reference.window_length(getattr(case.length, "at_most", case.length), n.update_step)
        counted = sum(weight for weight, *_, skipped in window if not skipped)
        if held >= length or counted >= getattr(case.length, "budget", np.inf):
            close()
        if i == case.reset_at:
            window.clear()
            held = n.skipped_in_row = 0
    if held and flushes:
        close()
    whole = [(weight, sums_of(parameters, parts)[0])
             for batch in case.data for weight, parts in pieces_of(case, *batch)]
    n.evaluated = sum(loss for _, loss in whole) / max(sum(weight for weight, _ in whole), least)
    return parameters, np.array(losses), n


@ms.jit_class
class Watching(Stage):
    """Note the weights of an update's pieces, the spread of their gradients, and the square of their mean."""

    measures = 2

    def __init__(self, times):
        self.times = times  # not what another stage measures
        self.noted = Parameter(Tensor(np.zeros(3), ms.float32), name="noted", requires_grad=False)
        self.state = (self.noted,)

    def measure(self, gradients, factor, weight):
        spread, weight = ops.square(gradients[-1] * factor).sum() * weight, as_tensor(weight)
        return weight * self.times, ops.where(weight > 0, spread, ops.zeros_like(weight))

    def on_update(self, window):
        mean = window["gradients"][-1] * (window["unit"] / window["weight"])
        ops.assign(self.noted, ops.stack((*window["measured"], ops.square(mean).sum())))


def functions_of(case, network, eager):
    def number(weight):
        return float(weight.asnumpy()) if eager and case.numbers else weight

    def losses_of(x, y):
        return ops.cross_entropy(network(x if case.axis == 0 else x.T), y, reduction="none")

    def samples(x, y, mask):
        return losses_of(x, y).mean()

    def summed(x, y, mask):
        return (losses_of(x, y) * (mask != 0)).sum()

    def tokens(x, y, mask):
        return summed(x, y, mask) / (mask != 0).sum()

    def returned(x, y, mask):
        return tokens(x, y, mask), number(mask.sum())

    def objects(x, y, mask):
        return summed(x, y, mask) + 0.5 * losses_of(x, y).sum()

    def returned_sum(x, y, mask):
        return summed(x, y, mask), number(mask.sum())

    def weight_fn(mask):
        return number(mask.sum())

    def weight_of_all(x, y, mask):
        return number(mask.sum())

    weigh = weight_fn if case.by_name else weight_of_all
    return {"samples": (samples, {}), "tokens": (tokens, {"weight_fn": weigh}),
            "returned": (returned, {"has_weight": True}),
            "sum": (summed, {"weight_fn": weigh, "loss_reduction": "sum"}),
            "objects": (objects, {"weight_fn": weigh, "loss_reduction": "sum"}),
            "returned sum": (returned_sum, {"has_weight": True, "loss_reduction": "sum"})}[case.kind]


def ours(case, mode):
    """The parameters, the losses, and what is counted. A run that is stopped goes on in another one."""
    eager, losses, reset_at = case.eager and mode != "jit", [], case.reset_at
    policy = {"on_nonfinite": case.policy} if case.policy != "scaled" else {"loss_scaler": amp.StaticLossScaler(2.0**7)}
    data = [(np.float32(x if case.axis == 0 else x.T), np.int32(y), np.float32(mask)) for x, y, mask in case.data]
    given = [dict(zip(("x", "y", "mask"), batch)) for batch in data] if case.by_name else data
    for stop in (case.stop, None):
        network, stages = MLP(), tuple(Watching(i + 1) for i in range(case.watches))
        forward_fn, options = functions_of(case, network, eager)
        with running(mode), recorded_warnings():
            step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), RATE), case.length, max_skips=None,
                                   pieces=case.pieces, batch_axis=case.axis, clip_norm=case.clip_norm, stages=stages,
                                   min_weight=case.min_weight, eager=eager, network=network, **policy, **options)
            if losses:
                load_checkpoint("run.safetensors", network, step)
            losses = losses[:step.trained]
            for loss in islice(step.epoch(given, skip=step.trained), stop):
                losses.append(float(loss))
                if len(losses) - 1 == reset_at:  # once, also if a file goes back too far
                    step.reset()
                    reset_at = None
            if step.epochs:
                evaluated = step.evaluate(given) if step.status().seen else np.nan  # there is no mean
                break
            save_checkpoint("run.safetensors", network, step)
    noted = stages[-1].noted.asnumpy() if stages else [np.nan] * 3
    return values(network.trainable_params()), np.array(losses), {
        **step.status()._asdict(), **dict(zip(("weights", "spread", "squares"), noted)), "evaluated": evaluated}


def off(case, mode, **changes):
    """How far a training is from the oracle's: its parameters, its losses, and what is counted otherwise."""
    parameters, losses, status = ours(case, mode)
    expected, expected_losses, n = oracle(case, **changes)
    counted = {name: (status[name], value) for name, value in vars(n).items() if np.isfinite(value)
               and status[name] != pytest.approx(value, rel=1e-5, abs=0.5 if name == "seen" else 1e-6)}
    np.testing.assert_array_equal(np.isnan(losses), np.isnan(expected_losses))
    return difference(parameters, expected), np.nanmax(np.abs(losses - expected_losses)), counted


FAST = together(28)


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.slow] * (i not in FAST)) for i in range(100)])
def test_any_run_op_by_op_is_that_of_the_oracle(seed):
    case = drawn(seed)
    print({**vars(case), "data": [len(x) for x, _, _ in case.data]})
    moved, losses, counted = off(case, "pynative")
    assert counted == {}
    assert (moved < 3e-5, losses < 3e-5) == (True, True), (moved, losses)


@pytest.mark.parametrize("seed", [60, *(pytest.param(i, marks=pytest.mark.slow) for i in range(61, 80))])
def test_any_run_in_graphs_is_that_of_the_oracle(seed):
    case = drawn(seed)
    case.data = [(x[:5], y[:5], mask[:5]) for x, y, mask in case.data if len(x) in (0, 5, 6)]  # one layout
    case.data = [tuple([part[:0] for part in case.data[0]])] * 4 + case.data  # a window without samples comes first
    print({**vars(case), "data": [len(x) for x, _, _ in case.data]})
    moved, losses, counted = off(case, "jit")
    assert counted == {}
    assert (moved < 3e-5, losses < 3e-5) == (True, True), (moved, losses)


def test_the_oracle_finds_a_mean_of_means_a_lost_window_and_a_lost_background():
    """Negative controls."""
    case = drawn(1)
    case.policy, case.kind, case.length, case.clip_norm, case.axis, case.pieces = "apply", "tokens", 4, None, 0, 1
    case.min_weight = case.stop = case.reset_at = None
    rng = np.random.default_rng(0)
    case.data = [(rng.normal(size=(n, 6)), rng.integers(0, 3, n), np.float32(rng.random(n) < 0.6))
                 for n in (6, 4, 6, 5, 6, 6)]
    assert off(case, "pynative")[0] < 5e-6
    assert off(case, "pynative", weigh=False)[0] > 1e-3
    moved, _, counted = off(case, "pynative", flushes=False)
    assert moved > 1e-3
    assert {"update_step", "closed_windows", "seen"} <= {*counted}
    case.kind, case.data, case.min_weight = "objects", [(x, y, mask * 0) for x, y, mask in case.data], 1.0
    assert off(case, "pynative")[0] < 5e-6
    case.min_weight = None  # the background is ignored
    assert difference(ours(case, "pynative")[0], values(MLP().trainable_params())) == 0


@pytest.mark.parametrize("mode", ["pynative", "eager", "jit"])
def test_what_weighs_nothing_has_the_loss_0_and_a_bad_weight_is_nan(mode):
    """Control: what MindSpore gives for a mean over nothing."""
    network = MLP()
    x, y = Tensor(np.ones((4, 6)), ms.float32), Tensor(np.full(4, -100), ms.int32)

    def forward_fn(x, y, weight):
        return ops.cross_entropy(network(x), y, ignore_index=-100)

    def weight_fn(x, y, weight):
        return weight

    assert np.isnan(float(forward_fn(x, y, None)))
    with running("pynative" if mode == "eager" else mode):
        step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), RATE), 9, weight_fn=weight_fn,
                               eager=mode == "eager")
        assert [float(step(x, y, nothing)) for nothing in (Tensor(0.0), 0.0)] == [0, 0]
        assert [b.asnumpy().any() for b in step.boundary.window.buffers] == [False] * 4
        assert all(np.isnan(float(step(x, y * 0, Tensor(bad)))) for bad in (-1.0, np.nan, np.inf))
        summed = make_train_step(forward_fn, nn.SGD(network.trainable_params(), RATE), 1, weight_fn=weight_fn,
                                 loss_reduction="sum", on_nonfinite="skip_window", eager=mode == "eager")
        assert np.isnan(float(summed(x, y * 0, Tensor(np.inf))))
        assert summed.status().skipped == 1  # its gradients are finite
        assert step.flush()
        assert step.status().seen == 0


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_a_clipped_update_with_a_mean_over_nothing_changes_nothing(mode):
    """Control: the gradient is NaN."""
    network, x = MLP(), Tensor(np.ones((4, 6)), ms.float32)

    def forward_fn(x, mask):
        return (network(x).sum(-1) * mask).sum() / mask.sum()

    def weight_fn(x, mask):
        return mask.sum() if mode == "jit" else float(mask.sum())

    with running("pynative" if mode == "eager" else mode):
        step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), RATE), 1, clip_norm=1.0,
                               weight_fn=weight_fn, eager=mode == "eager")
        before, nothing = values(network.trainable_params()), ops.zeros(4)
        assert np.isnan(ms.grad(forward_fn, None, network.trainable_params())(x, nothing)[0].asnumpy()).any()
        step(x, nothing)
    assert difference(before, values(network.trainable_params())) == 0
    assert (step.status().grad_norm, step.status().empty_windows) == (0, 1)


@pytest.mark.parametrize("mode", ["jit", "pynative"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_returned_weight_is_not_differentiated(reduction, mode):
    """Control: that of a quotient is."""
    network, x = nn.Dense(6, 1, "ones", "ones"), Tensor(np.random.default_rng(0).normal(size=(6, 6)), ms.float32)

    def weigh():
        return ops.exp(network.bias).sum() * 2

    def returning(x):
        loss = ops.square(network(x)).sum()
        return loss / (1 if reduction == "sum" else 6), weigh()

    def quotient(x):
        return ops.square(network(x)).sum() / weigh()

    def plain(x):
        return ops.square(network(x)).sum()

    weights = ms.ParameterTuple(network.trainable_params())
    constant = float(weigh()) if reduction == "sum" else 6
    expected = [g.asnumpy() / constant for g in ms.grad(plain, None, weights)(x)]
    control = [g.asnumpy() for g in ms.grad(quotient, None, weights)(x)]
    before = [p.asnumpy().copy() for p in weights]
    with running(mode):
        make_train_step(returning, nn.SGD(weights, 1.0), 1, has_weight=True, loss_reduction=reduction)(x)
    moved = [old - p.asnumpy() for old, p in zip(before, weights)]
    assert difference(moved, expected) < 1e-5
    assert difference(moved, control) > 1e-3

"""What all drivers share: weights, backward passes that are not linear, precision, errors in the middle of a window, memory, refusals."""
import functools
import os
import re
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

import memory
import mindspore as ms
import numpy as np
import pytest
import reference
import wrong_results
from conftest import MLP, Clip, batches, compiled, difference, in_modes, mean_loss, run_python, tensors, values
from following import LOSS, forward_of, make_driver, op_by_op, run_as
from mindspore import Parameter, ParameterTuple, Tensor, amp, nn, ops

from ms_accum import Accumulator, GradientNoiseScale, load_checkpoint, make_train_step, save_checkpoint

(X, Y), = batches([16])


def trained(network, accumulate_step=1, **options):
    return Accumulator(nn.SGD(network.trainable_params(), 0.1), accumulate_step, reduction="mean", **options)


def oracle_of(x, y, rate=0.1):
    """The parameters of MLP after an update on the undivided batch."""
    weights = values(MLP().trainable_params())
    return [w - rate * g for w, g in zip(weights, reference.loss_and_gradients(weights, x, y)[1])]


def feed(train_step, mode="jit", microbatches=2):
    """Train on X, Y in so many calls; the last result."""
    with run_as(mode):
        for x, y in zip(np.split(X, microbatches), np.split(Y, microbatches)):
            result = train_step(*tensors(x, y))
    return result


# --- weights, the backward pass and loss scales -----------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "driver", "microbatches", "micro_size"), in_modes(
    [("fused", 4, 1), ("split", 4, 1), ("fused", 2, 2), ("fused", 1, 4), ("fused", 1, 1), ("cell", 4, 1), ("cell", 2, 2)],
    [("fused", 2, 2)]))
def test_a_backward_pass_that_is_not_linear_is_left_alone(mode, driver, microbatches, micro_size):
    """Clipped above those of a mean over 4. Control: a factor of 16, as of a sample count, gives another gradient."""
    network = nn.SequentialCell(MLP(), Clip(0.3))
    parameters = network.trainable_params()

    def multiplied(x, y):
        return LOSS(network(x), y) * 16

    plain, clipped = (values(ms.grad(f, None, parameters)(*tensors(X, Y))) for f in (forward_of(network), multiplied))
    assert difference([g / 16 for g in clipped], plain) > 0.1
    accumulator = trained(network, microbatches)
    feed(make_driver(driver, network, accumulator, micro_size=micro_size), mode, microbatches)
    assert int(accumulator.update_step) == 1
    assert difference(values(parameters), oracle_of(X, Y)) < 1e-6


WEIGHTS = {"int": 70_000, "float": 70_000.0, "tensor": Tensor(70_000.0)}


@pytest.mark.parametrize(("mode", "weight", "buffer_dtype"), in_modes(
    [*product(WEIGHTS, (None, ms.float16))], [("tensor", ms.float16)]))
def test_large_weights_meet_neither_loss_nor_buffer(mode, weight, buffer_dtype):
    """A float16 loss times 70,000 is infinite, and so is a gradient in a float16 buffer. The functions are partial ones of partial ones."""
    network, weight = MLP(), WEIGHTS[weight]
    before = values(network.trainable_params())
    accumulator = trained(network, 2, buffer_dtype=buffer_dtype)

    def forward_fn(scale, x, y, factor):
        return (LOSS(network(x), y) * scale * factor).astype(ms.float16)

    def weight_fn(weight, x, y):
        return weight

    forward_fn = functools.partial(functools.partial(forward_fn, 0.5), factor=Tensor(2.0))
    feed(make_train_step(forward_fn, accumulator, weight_fn=functools.partial(weight_fn, weight)), mode)
    moved, expected = ([a - b for a, b in zip(after, before)] for after in (values(network.trainable_params()), oracle_of(X, Y)))
    assert difference(moved, expected) < 5e-3
    assert float(accumulator.window_weight) == 140_000


MEAN, SUM = -2, -16  # of gradients 1 and 5 with the weights 6 and 2: minus (6 * 1 + 2 * 5) / 8, or undivided
FORMS = [
    (6, 2, MEAN), (6, 2.0, SUM), (Tensor(6.0), 2, MEAN), (6, Tensor(2.0), MEAN), (Tensor(6.0), Tensor(2.0), MEAN),
    (ms.mutable(6.0), ms.mutable(2.0), MEAN),
    (Tensor(6, ms.int32), Tensor([2.0], ms.float16), MEAN), (Tensor(6, ms.int64), Tensor([2.0], ms.float64), MEAN),
]


@pytest.mark.parametrize(("mode", "ignored"), in_modes([("number",), ("tensor",)], [("tensor",)]))
def test_weights_of_every_form_share_one_unit(mode, ignored):
    """In one graph, an accumulator for each pair of forms: numbers, Tensors, and numbers that may change."""
    ignored = {"number": 0, "tensor": Tensor(0.0)}[ignored]
    accumulators = [
        Accumulator(nn.SGD([Parameter(Tensor([0.0, 0.0]), name=f"{name}{i}") for name in "ab"], 1.0), 3,
                    reduction="sum" if expected == SUM else "mean") for i, (*_, expected) in enumerate(FORMS)]

    def step(gradient, *weights):
        for i in range(len(FORMS)):
            accumulators[i].add((gradient, gradient), weights[i])
        large.add((ops.ones_like(gradient),), 10**12)  # an int of the graph must not wrap around
        return gradient

    large = Accumulator(nn.SGD([Parameter(Tensor([0.0, 0.0]), name="large")], 1.0), 9, reduction="mean")
    step = compiled(step, mode)
    first, second, all_expected = zip(*FORMS)
    for value, weights in ((np.nan, [ignored] * len(FORMS)), (1.0, first), (5.0, second)):
        step(Tensor([value, value], ms.float32), *weights)
    for accumulator, expected in zip(accumulators, all_expected):
        assert accumulator.flush()
        for p in accumulator.optimizer.parameters:
            np.testing.assert_allclose(p.asnumpy(), expected, rtol=1e-6)
        assert float(accumulator.window_weight) == (0 if expected == SUM else 8)
    assert large.flush()
    np.testing.assert_allclose(large.optimizer.parameters[0].asnumpy(), -1, rtol=1e-6)


@pytest.mark.parametrize("mode", ["jit", "pynative"])
def test_the_unit_of_the_weights_is_known_late_and_kept_in_a_checkpoint(mode):
    """`flush` is compiled before any weight is known. Saved with a microbatch of 48 in the window; loaded where one of 16 came first."""
    def build():
        cell = nn.Cell()
        cell.weight = Parameter(Tensor([0.0, 0.0]), name="weight")
        accumulator = Accumulator(nn.SGD(cell.trainable_params(), 1.0), 4, reduction="mean")

        def flush():
            return accumulator.flush()

        def step(gradient, weight):
            return accumulator((gradient,), weight)

        flush, step = compiled(flush, mode), compiled(step, mode)
        assert not flush()
        return cell, accumulator, flush, step

    cell, accumulator, flush, step = build()
    step(Tensor([1.0, 5.0]), 48)
    save_checkpoint("unit.ckpt", cell, accumulator)
    for first in (None, 16):
        cell, accumulator, flush, step = build()
        if first is not None:
            step(Tensor([7.0, 7.0]), first)
        load_checkpoint("unit.ckpt", cell, accumulator)
        assert float(accumulator.weight_sum) == 48
        step(Tensor([5.0, 9.0]), 16)
        assert flush()
        assert cell.weight.asnumpy().tolist() == [-2.0, -6.0]  # (48 * 1 + 16 * 5) / 64, (48 * 5 + 16 * 9) / 64


@pytest.mark.parametrize(("mode", "on_nonfinite"), in_modes([("apply",), ("skip_microbatch",), ("skip_window",)], [("skip_window",)]))
def test_a_weight_that_is_not_finite_shows_in_the_loss(mode, on_nonfinite):
    network = MLP()
    accumulator = trained(network, on_nonfinite=on_nonfinite)
    before = values(network.trainable_params())

    def forward_fn(x, y, counted):
        return LOSS(network(x), y)

    def weight_fn(x, y, counted):
        return counted.sum()

    train_step, batch = make_train_step(forward_fn, accumulator, weight_fn=weight_fn), tensors(X, Y)
    with run_as(mode):
        assert np.isnan(float(train_step(*batch, Tensor([np.nan]))))
        after = values(network.trainable_params())
        if on_nonfinite == "apply":
            assert all(np.isnan(p).all() for p in after)
            return
        assert difference(after, before) == 0
        assert int(accumulator.skipped) == 1
        assert np.isfinite(float(train_step(*batch, Tensor([1.0]))))
    assert difference(values(network.trainable_params()), oracle_of(X, Y)) < 1e-6


@pytest.mark.fresh_process("jit")
@pytest.mark.parametrize("mode", ["jit"])
def test_between_a_weight_gradient_and_its_buffer_is_nothing_but_a_cast(mode):
    """What Ascend's `matmul_assignadd_fusion` looks for. A microbatch of another size needs a multiplication: the control."""
    # Read with the first graph of a process; graphs after this test's would go into the working directory if it were undone.
    os.environ.update(MS_DEV_SAVE_GRAPHS="1", MS_DEV_SAVE_GRAPHS_PATH=str(Path("ir").absolute()))
    for dtype, sizes in ((ms.float32, (6, 4)), (ms.float16, (6,)), (ms.bfloat16, (6,))):
        network = MLP().to_float(dtype)
        train_step = make_train_step(mean_loss(network), trained(network, 4), strategy="split")
        with suppress(*([RuntimeError, TypeError] if dtype == ms.bfloat16 else [])):  # CPU has no kernels for it; the graph is there
            for x, y in batches(sizes):
                train_step(*tensors(x, y))
    graphs = [file.read_text(encoding="utf-8") for file in sorted(Path("ir").glob("*_validate_*.ir"))]
    chains = [chain for graph in graphs if (chain := before_each_buffer(graph))]
    assert chains == [[each, each] for each in ([], ["Mul"], ["Cast"], ["Cast"])]


def before_each_buffer(graph):
    """The names of the nodes between a MatMul and the AssignAdd into the buffer of a weight, for each of these."""
    nodes = {number: (name, arguments.split(", ")) for number, name, arguments in re.findall(
        r"^\s*(%\d+)\(.*?\) = PrimFunc_(\w+)\(([^)]*)", graph, re.MULTILINE)}
    found = []
    for name, arguments in nodes.values():
        if name == "AssignAdd" and re.fullmatch(r"%para\d+_accumulator\d+\.(first|second)\.weight", arguments[0]):
            found.append([])
            gradient = arguments[1]
            while nodes[gradient][0] != "MatMul":
                found[-1].append(nodes[gradient][0])
                gradient = nodes[gradient][1][0]
    return found


@pytest.mark.parametrize(("mode", "scale"), in_modes([(2.0**16,), (2.0**63,), (2.0**120,)], [(2.0**120,)]))
def test_a_loss_scale_of_any_size_changes_nothing(mode, scale):
    results = []
    for how, scaler in (("pynative", None), (mode, amp.StaticLossScaler(scale))):
        network, noise_scale = MLP(), GradientNoiseScale()
        accumulator = trained(network, 4, clip_norm=0.05, noise_scale=noise_scale)
        feed(make_train_step(forward_of(network), accumulator, loss_scaler=scaler), how, 8)
        assert (int(accumulator.update_step), int(accumulator.skipped)) == (2, 0)
        results.append([*values(network.trainable_params()), np.array(float(accumulator.grad_norm)), np.array(noise_scale.scale())])
    assert results[0][-2] > 0.05  # it clips
    assert difference(results[1], results[0]) < 1e-6


# --- errors and interruptions in the middle of a window ----------------------------------------------------------------------

BAD = np.where(np.arange(16) == 6, 9, Y)  # a label that is out of range raises


def at_half(driver, micro_size=1):
    """A driver in the middle of a window of two; its network as it was at first."""
    network = MLP()
    accumulator = trained(network, 2)
    train_step = make_driver(driver, network, accumulator, micro_size=micro_size)
    train_step(*tensors(X, Y))
    return network, accumulator, train_step


@pytest.mark.parametrize(("mode", "driver"), [
    pytest.param("jit", "fused", marks=pytest.mark.slow), ("graph", "cell"), ("pynative", "split"), ("pynative", "cell"),
    pytest.param("jit", "split", marks=pytest.mark.slow)])
def test_a_window_with_a_part_of_a_batch_is_refused_until_it_is_reset(mode_named, mode, driver):
    mode_named(mode)
    with run_as(mode):
        network, accumulator, train_step = at_half(driver, micro_size=8)
        with pytest.raises(RuntimeError, match="must be in"):
            train_step(*tensors(X, BAD))
        assert float(accumulator.weight_sum) == 22
        for refused in (lambda: train_step(*tensors(X, Y)), lambda: save_checkpoint("torn.ckpt", network, accumulator)):
            with pytest.raises(RuntimeError, match=r"may hold only some pieces of a batch.* call accumulator\.reset\(\)"):
                refused()
        with pytest.raises(RuntimeError, match="only some pieces of a batch"):
            train_step.flush()
        assert not Path("torn.ckpt").exists()
        accumulator.reset()
        for x, y in ((X, Y), (X[::-1], Y)):
            train_step(*tensors(x, y))
    assert int(accumulator.update_step) == 1
    assert difference(values(network.trainable_params()), oracle_of(np.concatenate((X, X[::-1])), np.concatenate((Y, Y)))) < 1e-6


LATE = """
import mindspore as ms, numpy as np
from mindspore import Tensor, nn
from ms_accum import make_train_step
network = nn.SequentialCell(nn.Embedding(4, 3), nn.Flatten(), nn.Dense(3, 1))
def forward_fn(ids):
    return network(ids).mean()
train_step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), 0.1), accumulate_step=2, micro_size=2)
good, bad = Tensor([[0], [1], [2], [3]], ms.int32), Tensor([[0], [1], [2], [99999999]], ms.int32)
float(train_step(good))
short = Tensor([[0], [1]], ms.int32)
for batch in (bad, short):
    try:
        float(train_step(batch))
    except RuntimeError:
        pass
print(int(train_step.accumulator.update_step))
try:
    print(train_step.flush())
except RuntimeError as error:
    print(str(error)[:60])
train_step.accumulator.reset()
print(len([train_step(short) for _ in range(2)]), int(train_step.accumulator.update_step))
"""


def test_a_torn_window_is_never_applied_if_mindspore_reports_the_error_late(monkeypatch):
    """As it does in its default environment."""
    monkeypatch.delenv("MS_DEV_HOST_BLOCKING_RUN", raising=False)
    assert run_python(LATE).splitlines() == ["0", "the open window may hold only some pieces of a batch, becaus", "2 1"]


def test_a_step_goes_on_after_an_error_that_added_nothing():
    """MindSpore's own graph would fail in each later call; the next one here compiles it again."""
    network, accumulator, train_step = at_half("fused")
    with pytest.raises(RuntimeError, match="must be in"):
        train_step(*tensors(X, BAD))
    assert (float(accumulator.weight_sum), int(accumulator.mini_step)) == (16, 1)
    train_step(*tensors(X, Y))
    assert difference(values(network.trainable_params()), oracle_of(X, Y)) < 1e-6


class Interrupted(nn.Cell):
    """An optimizer whose first call is stopped."""

    def __init__(self, parameters, stops):
        super().__init__(auto_prefix=False)
        self.parameters, self.inner = ParameterTuple(parameters), nn.SGD(parameters, 0.1)
        self.stops = stops

    def construct(self, grads):
        if self.stops:
            self.stops = False
            raise KeyboardInterrupt
        return self.inner(grads)


def test_split_interrupted_between_its_graphs_closes_the_window_first():
    results = []
    for stops in (False, True):
        network = MLP()
        accumulator = Accumulator(Interrupted(network.trainable_params(), stops), 2, reduction="mean")
        with op_by_op():
            train_step = make_driver("split", network, accumulator)
            for i, (x, y) in enumerate(batches([4] * 4)):
                if stops and i == 1:
                    with pytest.raises(KeyboardInterrupt):
                        train_step(*tensors(x, y))
                else:
                    train_step(*tensors(x, y))
        assert int(accumulator.update_step) == 2
        results.append(values(network.trainable_params()))
    assert difference(results[1], results[0]) == 0


# --- memory, wrong results ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.fresh_process("jit")
@pytest.mark.parametrize("mode", ["jit"])
def test_peak_memory_is_that_of_one_piece(mode):
    """768 samples in 48 pieces, compilers included. What is not cut takes again what the other two have freed: its need is the sum."""
    memory.growth("undivided", 16, 1)  # the compiler's own memory
    cached, cut = (memory.growth(kind, 768, 48) for kind in ("cached", "cut"))
    whole = cached + cut + memory.growth("undivided", 768, 1)
    assert whole > 500_000  # KiB: 48 Ki tokens, of 2,000 floats and as many gradients
    assert cached <= 0.3 * whole
    assert cut <= 0.25 * whole


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory_is_flat_in_the_batch():
    """From 32 samples to 512 in pieces of 16, each in a process of its own, so that the compiler's memory is on both sides."""
    def grown(kind):
        script = Path(memory.__file__).read_text(encoding="utf-8")
        small, large = (int(run_python(script, kind, samples)) for samples in ("32", "512"))
        return large - small

    undivided = grown("undivided")
    assert undivided > 120_000  # KiB
    assert grown("cached") <= 0.2 * undivided
    assert grown("cut") <= 0.2 * undivided


@pytest.mark.fresh_process("jit")
@pytest.mark.parametrize("mode", ["jit", "pynative"])
def test_functions_that_return_what_cannot_be_used_are_refused(mode):
    """And change nothing. After such an error MindSpore 2.10 now and then cannot compile another gradient."""
    with run_as(mode):
        assert [wrong_results.refusal(functions) for functions, _ in wrong_results.CASES] == [message for _, message in wrong_results.CASES]

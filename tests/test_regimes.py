"""The regimes people train in: mixed precision, layers whose backward pass is not linear, large loss scales, errors in the middle."""
import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from conftest import compiled, difference, run_python, values
from mindspore import Parameter, Tensor, amp, nn, ops

from ms_accum import (
    Accumulator,
    GradientNoiseScale,
    TrainOneStepCell,
    load_checkpoint,
    make_grad_cache_step,
    make_train_step,
    save_checkpoint,
)

RNG = np.random.default_rng(7)
X = Tensor(RNG.normal(size=(64, 8)), ms.float32)
Y = Tensor(0.5 * RNG.normal(size=(64, 1)), ms.float32)


class Clipping(nn.Cell):
    """Passes on what it gets; its backward pass is not linear: gradients are clipped to ±0.3."""

    def construct(self, x):
        return x

    def bprop(self, x, out, dout):
        return (ops.clip_by_value(dout, Tensor(-0.3, ms.float32), Tensor(0.3, ms.float32)),)


def network_of(*layers):
    network = nn.SequentialCell(nn.Dense(8, 16), nn.Tanh(), *layers, nn.Dense(16, 1))
    rng = np.random.default_rng(0)
    for parameter in network.trainable_params():
        parameter.set_data(Tensor(rng.normal(0, 0.3, parameter.shape), ms.float32))
    return network


def squared_error(network):
    def forward_fn(x, y):
        return ((network(x) - y) ** 2).mean()
    return forward_fn


def plain_update(network, x, y):
    """One step of SGD by MindSpore alone."""
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    optimizer(ms.value_and_grad(squared_error(network), None, optimizer.parameters)(x, y)[1])
    return values(optimizer.parameters)


class Loss(nn.Cell):
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x, y):
        return ((self.network(x) - y) ** 2).mean()


# --- weights and the backward pass -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("driver", "microbatches", "micro_size"),
                         [("fused", 4, 1), ("split", 4, 1), ("fused", 1, 4), ("fused", 1, 1), ("cell", 4, 1), ("cell", 2, 2)])
def test_a_backward_pass_that_is_not_linear_is_left_alone(driver, microbatches, micro_size):
    expected = plain_update(network_of(Clipping()), X, Y)
    network = network_of(Clipping())
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), microbatches, reduction="mean")
    if driver == "cell":
        train_step = TrainOneStepCell(Loss(network), accumulator, micro_size=micro_size)
    else:
        train_step = make_train_step(squared_error(network), accumulator, micro_size=micro_size, strategy=driver)
    size = 64 // microbatches
    for i in range(microbatches):
        train_step(X[i * size:(i + 1) * size], Y[i * size:(i + 1) * size])
    assert int(accumulator.update_step) == 1
    assert difference(values(accumulator.optimizer.parameters), expected) < 1e-6


def test_such_a_layer_sees_a_loss_that_is_multiplied():
    """The control: a factor of 64 in front of the backward pass, as a sample count, and the gradient is another one."""
    network = network_of(Clipping())
    parameters = network.trainable_params()
    plain = values(ms.grad(squared_error(network), None, parameters)(X, Y))

    def multiplied(x, y):
        return squared_error(network)(x, y) * 64

    assert difference([g / 64 for g in values(ms.grad(multiplied, None, parameters)(X, Y))], plain) > 0.1


@pytest.mark.parametrize("weight", [70_000, 70_000.0, Tensor(70_000.0)], ids=["int", "float", "tensor"])
@pytest.mark.parametrize("buffer_dtype", [None, ms.float16])
def test_large_weights_meet_neither_loss_nor_buffer(mode, weight, buffer_dtype):
    """A float16 loss times 70,000 is infinite, and so is a gradient in a float16 buffer."""
    network = network_of()
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean", buffer_dtype=buffer_dtype)
    before = values(accumulator.optimizer.parameters)

    def weight_fn(x, y):
        return weight

    def forward_fn(x, y):
        return squared_error(network)(x, y).astype(ms.float16)

    if mode == "jit":
        train_step = make_train_step(forward_fn, accumulator, weight_fn=weight_fn)
    else:
        grad_fn = ms.value_and_grad(forward_fn, None, accumulator.optimizer.parameters)

        def train_step(x, y):
            accumulator(grad_fn(x, y)[1], weight_fn(x, y))

    for i in (0, 32):
        train_step(X[i:i + 32], Y[i:i + 32])
    moved = [a - b for a, b in zip(values(accumulator.optimizer.parameters), before)]
    expected = [a - b for a, b in zip(plain_update(network_of(), X, Y), before)]
    assert difference(moved, expected) < 5e-3
    assert float(accumulator.window_weight) == 140_000


def test_a_checkpoint_keeps_the_unit_of_its_weights(mode):
    """Saved with microbatches of 32, of which one is in the window; loaded where microbatches of 16 came first."""
    def build():
        network = network_of()
        accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
        grad_fn = ms.value_and_grad(squared_error(network), None, accumulator.optimizer.parameters)

        def train_step(rows):
            x, y = X[rows], Y[rows]
            return compiled(lambda_free(accumulator, grad_fn, len(x)), mode)(x, y)

        return network, accumulator, train_step

    network, accumulator, train_step = build()
    train_step(slice(0, 48))
    save_checkpoint("unit.ckpt", network, accumulator)
    for first in (None, slice(0, 16)):
        network, accumulator, train_step = build()
        if first is not None:
            train_step(first)
        load_checkpoint("unit.ckpt", network, accumulator)
        assert float(accumulator.weight_sum) == 48
        train_step(slice(48, 64))
        assert int(accumulator.update_step) == 1
        assert difference(values(accumulator.optimizer.parameters), plain_update(network_of(), X, Y)) < 1e-6


@pytest.mark.parametrize(("first", "second"), [
    (6, 2), (Tensor(6.0), 2), (6, Tensor(2.0)), (Tensor(6.0), Tensor(2.0)), (ms.mutable(6.0), ms.mutable(2.0))],
    ids=["numbers", "tensor-number", "number-tensor", "tensors", "changing-numbers"])
@pytest.mark.parametrize("ignored", [0, Tensor(0.0)], ids=["number", "tensor"])
def test_weights_of_every_form_share_one_unit(mode, first, second, ignored):
    parameters = [Parameter(Tensor(np.zeros((2, 3 + i)), ms.float32), name=f"weight{i}") for i in range(2)]
    accumulator = Accumulator(nn.SGD(parameters, 1.0), 3, reduction="mean")

    def step(gradients, weight):
        return accumulator(gradients, weight)

    step = compiled(step, mode)
    for value, weight in ((np.nan, ignored), (1.0, first), (5.0, second)):
        step(tuple(Tensor(np.full(p.shape, value), ms.float32) for p in parameters), weight)
    assert all((p.asnumpy() == -2).all() for p in parameters)  # (6 * 1 + 2 * 5) / 8
    assert float(accumulator.window_weight) == 8


def lambda_free(accumulator, grad_fn, samples):
    def step(x, y):
        _, gradients = grad_fn(x, y)
        return accumulator(gradients, samples)
    return step


WRITES_GRAPHS = """
import sys
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from ms_accum import Accumulator, make_train_step

network = nn.SequentialCell(nn.Dense(8, 16), nn.Tanh(), nn.Dense(16, 4)).to_float(getattr(ms, sys.argv[1]))

def forward_fn(x, y):
    return ((network(x).astype(ms.float32) - y) ** 2).mean()

accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 4, reduction="mean")
train_step = make_train_step(forward_fn, accumulator, strategy="split")
for samples in map(int, sys.argv[2:]):
    try:
        train_step(Tensor(np.ones((samples, 8)), ms.float32), Tensor(np.ones((samples, 4)), ms.float32))
    except (RuntimeError, TypeError):
        assert sys.argv[1] == "bfloat16"  # CPU has no kernels for it; the graph is there
"""


@pytest.mark.parametrize(("dtype", "samples", "between"), [
    ("float32", ["6"], [[]]), ("float16", ["6"], [["Cast"]]), ("bfloat16", ["6"], [["Cast"]]), ("float32", ["6", "4"], [[], ["Mul"]])])
def test_between_a_weight_gradient_and_its_buffer_is_nothing_but_a_cast(dtype, samples, between):
    """What Ascend's `matmul_assignadd_fusion` looks for. A microbatch of another size needs a multiplication: the control."""
    Path("graphs.py").write_text(WRITES_GRAPHS, encoding="utf-8")
    environment = {**os.environ, "MS_DEV_SAVE_GRAPHS": "1", "MS_DEV_SAVE_GRAPHS_PATH": "ir"}
    subprocess.run([sys.executable, "graphs.py", dtype, *samples], env=environment, check=True, capture_output=True)
    graphs = [file.read_text(encoding="utf-8") for file in sorted(Path("ir").glob("*_validate_*.ir"))]
    chains = [chain for graph in graphs if (chain := before_each_buffer(graph))]
    assert chains == [[each, each] for each in between]


def before_each_buffer(graph):
    """The names of the nodes between a MatMul and the AssignAdd into the buffer of a weight, for each of these."""
    nodes = {number: (name, arguments.split(", ")) for number, name, arguments in re.findall(
        r"^\s*(%\d+)\(.*?\) = PrimFunc_(\w+)\(([^)]*)", graph, re.MULTILINE)}
    found = []
    for name, arguments in nodes.values():
        if name == "AssignAdd" and re.fullmatch(r"%para\d+_accumulator0\.\d\.weight", arguments[0]):
            found.append([])
            gradient = arguments[1]
            while nodes[gradient][0] != "MatMul":
                found[-1].append(nodes[gradient][0])
                gradient = nodes[gradient][1][0]
    return found


# --- loss scales, norms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2.0**16, 2.0**63, 2.0**120])
def test_a_loss_scale_of_any_size_changes_nothing(scale):
    results = []
    for scaler in (None, amp.StaticLossScaler(scale)):
        network = network_of()
        noise_scale = GradientNoiseScale()
        accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 4, 0.5, reduction="mean", noise_scale=noise_scale)
        train_step = make_train_step(squared_error(network), accumulator, loss_scaler=scaler)
        for i in range(0, 64, 8):
            train_step(X[i:i + 8], Y[i:i + 8])
        assert (int(accumulator.update_step), int(accumulator.skipped)) == (2, 0)
        results.append([*values(accumulator.optimizer.parameters), float(accumulator.grad_norm), noise_scale.scale()])
    assert results[0][-2] > 0.5  # it clips
    assert difference([np.array(r) for r in results[1]], [np.array(r) for r in results[0]]) < 1e-6


@pytest.mark.parametrize("magnitude", [1e-25, 1e-12, 1.0, 1e15])
def test_the_norm_of_very_small_and_very_large_gradients(mode, magnitude):
    network = network_of()
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 1, float("inf"), reduction="mean")

    def step(factor):
        return accumulator(tuple([ops.ones_like(p) * factor for p in accumulator.optimizer.parameters]))

    compiled(step, mode)(Tensor(magnitude, ms.float32))
    elements = sum(p.size for p in accumulator.optimizer.parameters)
    assert float(accumulator.grad_norm) == pytest.approx(magnitude * np.sqrt(elements), rel=1e-5)


@pytest.mark.parametrize("on_nonfinite", ["apply", "skip_microbatch", "skip_window"])
def test_a_weight_that_is_not_finite_shows_in_the_loss(on_nonfinite):
    network = network_of()
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 1, reduction="mean", on_nonfinite=on_nonfinite)
    before = values(accumulator.optimizer.parameters)

    def weight_fn(x, y):
        return y.sum()

    train_step = make_train_step(squared_error(network), accumulator, weight_fn=weight_fn)
    good = Tensor(np.ones((8, 1)), ms.float32)
    loss = train_step(X[:8], good * float("nan"))
    assert np.isnan(float(loss))
    after = values(accumulator.optimizer.parameters)
    if on_nonfinite == "apply":
        assert all(np.isnan(p).all() for p in after)
    else:
        assert difference(after, before) == 0
        assert int(accumulator.skipped) == 1
        assert np.isfinite(float(train_step(X[:8], good)))
        assert 0 < difference(values(accumulator.optimizer.parameters), before) < np.inf


# --- errors and interruptions in the middle of a window ----------------------------------------------------------------------


class Classes(nn.Cell):
    """Raises for a label that is out of range."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.network = nn.Dense(8, 3)
        self.loss = nn.CrossEntropyLoss()

    def construct(self, x, label):
        return self.loss(self.network(x), label)


LABELS = Tensor(np.arange(8) % 3, ms.int32)
BAD_LABELS = Tensor([0, 1, 2, 0, 1, 2, 9, 0], ms.int32)


@pytest.mark.parametrize("driver", ["fused", "split", "cell", "cell-graph"])
def test_a_window_with_a_part_of_a_batch_is_refused_until_it_is_reset(mode_named, driver):
    mode_named("graph" if driver == "cell-graph" else "jit")
    network = Classes()
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    train_step = (TrainOneStepCell(network, accumulator, micro_size=4) if driver.startswith("cell")
                  else make_train_step(network, accumulator, micro_size=4, strategy=driver))
    train_step(X[:8], LABELS)
    with pytest.raises(RuntimeError, match="must be in"):
        train_step(X[:8], BAD_LABELS)
    assert float(accumulator.weight_sum) == 14
    for refused in (lambda: train_step(X[:8], LABELS), lambda: save_checkpoint("torn.ckpt", network, accumulator)):
        with pytest.raises(RuntimeError, match=r"may hold only some pieces of a batch.* call accumulator\.reset\(\)"):
            refused()
    with pytest.raises(RuntimeError, match="only some pieces of a batch"):
        train_step.flush()
    assert not Path("torn.ckpt").exists()
    accumulator.reset()
    reference = Classes()
    for mine, other in zip(reference.get_parameters(), network.get_parameters()):
        mine.set_data(Tensor(other.asnumpy().copy()))
    optimizer = nn.SGD(reference.trainable_params(), 0.1)
    optimizer(ms.grad(reference, None, optimizer.parameters)(X[:16], ops.concat((LABELS, LABELS))))
    train_step(X[:8], LABELS)
    train_step(X[8:16], LABELS)
    assert int(accumulator.update_step) == 1
    assert difference(values(accumulator.optimizer.parameters), values(optimizer.parameters)) < 1e-6


@pytest.mark.parametrize("view", ["slices", "transposed", "transposed-slices"])
@pytest.mark.parametrize("driver", ["fused", "cell"])
def test_views_are_cut_as_what_they_are(mode_named, driver, view):
    """A loop in a graph reads the wrong rows of them (MindSpore 2.10)."""
    mode_named("graph" if driver == "cell" else "jit")
    network = network_of()
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    train_step = (TrainOneStepCell(Loss(network), accumulator, micro_size=4) if driver == "cell"
                  else make_train_step(squared_error(network), accumulator, micro_size=4))
    x = X if view == "slices" else Tensor(np.ascontiguousarray(X.asnumpy().T)).T
    for i in (0, 32):
        part = x[i:i + 32]
        train_step(Tensor(np.ascontiguousarray(part.asnumpy().T)).T if view == "transposed" else part, Y[i:i + 32])
    mode_named("jit")
    assert difference(values(accumulator.optimizer.parameters), plain_update(network_of(), X, Y)) < 1e-6


def test_a_step_goes_on_after_an_error_that_added_nothing():
    """MindSpore's own graph would fail in each later call; the next one here compiles it again."""
    network = Classes()
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    train_step = make_train_step(network, accumulator)
    train_step(X[:8], LABELS)
    with pytest.raises(RuntimeError, match="must be in"):
        train_step(X[:8], BAD_LABELS)
    assert (float(accumulator.weight_sum), int(accumulator.mini_step)) == (8, 1)
    train_step(X[:8], LABELS)
    assert int(accumulator.update_step) == 1


def test_split_interrupted_between_its_graphs_closes_the_window_first(monkeypatch):
    results = []
    for interrupt in (False, True):
        network = network_of()
        accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
        train_step = make_train_step(squared_error(network), accumulator, strategy="split")
        for i in range(0, 64, 16):
            with monkeypatch.context() as patch:
                if interrupt and i == 16:
                    patch.setattr(train_step, "_update", stop)
                    with pytest.raises(KeyboardInterrupt):
                        train_step(X[i:i + 16], Y[i:i + 16])
                else:
                    train_step(X[i:i + 16], Y[i:i + 16])
        assert int(accumulator.update_step) == 2
        results.append(values(accumulator.optimizer.parameters))
    assert difference(results[1], results[0]) == 0


def stop():
    raise KeyboardInterrupt


# --- functions and shapes --------------------------------------------------------------------------------------------------


def times_factor(network):
    def forward_fn(x, y, factor=1.0):
        return ((network(x) - y) ** 2).mean() * factor
    return forward_fn


def test_partials_train_as_the_function(mode_named):
    mode_named("jit")
    results = []
    for wrap in (lambda f: f, functools.partial, lambda f: functools.partial(functools.partial(f), factor=Tensor(1.0))):
        network = network_of()
        accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 1, reduction="mean")
        make_train_step(wrap(times_factor(network)), accumulator)(X, Y)
        results.append(values(accumulator.optimizer.parameters))
    assert difference(results[1], results[0]) == difference(results[2], results[0]) == 0
    assert difference(results[0], plain_update(network_of(), X, Y)) < 1e-6


def test_a_lambda_among_other_code_is_refused_with_the_remedy():
    accumulator = Accumulator(nn.SGD(network_of().trainable_params(), 0.1), 1, reduction="mean")
    with pytest.raises(TypeError, match=r"forward_fn is a lambda whose source.*define it with def"):
        make_train_step(lambda x: x.mean(), accumulator)
    with pytest.raises(TypeError, match="weight_fn is a lambda"):
        make_train_step(Loss(network_of()), accumulator, weight_fn=lambda x, y: 1)
    with pytest.raises(TypeError, match="encode_fn is a lambda"):
        make_grad_cache_step(lambda x: x, inspect.signature, accumulator, micro_size=2)
    alone = lambda x: x.mean()  # noqa: E731
    assert make_train_step(alone, accumulator).accumulator is accumulator


@pytest.mark.parametrize("micro_size", [1, 2])
def test_dynamic_shapes_are_refused_with_the_remedy(mode_named, micro_size):
    mode_named("graph")
    network = network_of()
    cell = TrainOneStepCell(Loss(network), Accumulator(nn.SGD(network.trainable_params(), 0.1), 1, reduction="mean"), micro_size=micro_size)
    cell.set_inputs(Tensor(shape=[None, 8], dtype=ms.float32), Tensor(shape=[None, 1], dtype=ms.float32))
    with pytest.raises(ValueError, match=r"dynamic shape \(None, 8\).*leave set_inputs out"):
        cell(X, Y)


def test_a_compiled_boundary_before_the_first_microbatch_knows_no_unit():
    """`flush` is compiled before any weight is known; what it divides by is read when it runs."""
    assert run_python("""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from ms_accum import Accumulator

weight = Parameter(Tensor([0.0, 0.0]), name="weight")
accumulator = Accumulator(nn.SGD([weight], 1.0), 4, reduction="mean")

@ms.jit
def flush():
    return accumulator.flush()

@ms.jit
def add(gradient):
    return accumulator((gradient,), 8)

flush()
add(Tensor([3.0, 5.0]))
print(bool(flush()), weight.asnumpy().tolist())
""").split("\n")[-2] == "True [-3.0, -5.0]"

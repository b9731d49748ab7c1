"""Train steps that run op by op: any Python, one gradient at a time, and interrupts. Whole runs: test_exact.py."""
from dataclasses import dataclass
from weakref import ref

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.modes import compiled_graphs
from support.training import sgd, step_of

from ms_accum import Stage, make_train_step
from ms_accum.core import stream as streaming
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.core
SIZES = [4, 4, 2, 3, 1]
BATCH = tensors(*batches([6])[0])


@dataclass
class Routed:
    """What a graph cannot pass between layers."""

    hidden: Tensor
    way: str


def routed(network, chosen):
    """A forward function that decides by data and by a string, with a list, and a call that leaves MindSpore."""
    def forward_fn(x, y, source, notes=None):
        is_left = source.startswith("a") and np.isfinite(x.asnumpy()).all()
        passed = Routed(network.first(x), "left" if is_left else "right")
        chosen.append(passed.way)
        hidden = ops.tanh(passed.hidden) if passed.way == "left" else ops.relu(passed.hidden)
        return nn.CrossEntropyLoss()(network.second(hidden), y)
    return forward_fn


def data():
    """Batches with names, of which the second half goes right."""
    given = [dict(zip("xy", tensors(*batch))) for batch in batches(SIZES)]
    return [{**batch, "source": "abab a"[i], "notes": {"line": [i]}} for i, batch in enumerate(given)]


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"on_nonfinite": "skip_microbatch"}, {"pieces": 2}])
def test_any_python_trains_as_on_the_undivided_batch(options):
    """Plain: the sums of all samples' gradients, divided. Controls: a mean of means; the network is not compiled."""
    chosen, network = [], MLP(seed=0)
    before = compiled_graphs()
    step = make_train_step(routed(network, chosen), sgd(network), 2, eager=True, **options)
    losses = [float(loss) for loss in step.epoch(data())]
    assert compiled_graphs() == before + 2  # nn.SGD compiles itself, and a window its numbers
    assert {*chosen} == {"left", "right"}
    assert len(losses) == len(SIZES)

    def train(weigh):
        plain, given = MLP(seed=0), data()
        optimizer = sgd(plain)
        grad_fn = ms.value_and_grad(routed(plain, []), None, optimizer.parameters)
        for i in range(0, len(given), 2):
            window = given[i:i + 2]
            weights = [len(batch["x"]) if weigh else 1 for batch in window]
            found = [values(grad_fn(batch["x"], batch["y"], batch["source"])[1]) for batch in window]
            mean = [np.average(of_one, axis=0, weights=weights) for of_one in zip(*found)]
            norm = np.sqrt(sum((one**2).sum() for one in mean))
            factor = min(1.0, options.get("clip_norm", np.inf) / (norm + 1e-6))
            optimizer(tuple(Tensor(factor * one, ms.float32) for one in mean))
        return values(plain.trainable_params())

    assert difference(values(network.trainable_params()), train(weigh=True)) <= 1e-6
    assert difference(values(network.trainable_params()), train(weigh=False)) > 1e-4


@ms.jit_class
class Looking(Stage):
    """It looks at the gradients of each piece."""

    measures = 1

    def measure(self, gradients, factor, weight):
        return (gradients[0].sum(),)


@pytest.mark.parametrize(("options", "alive"), [
    ({}, 1), ({"pieces": 2}, 1), ({"stages": (Looking(),)}, 4), ({"on_nonfinite": "skip_microbatch"}, 4)])
def test_one_gradient_is_in_memory_at_a_time_unless_something_looks_at_all(options, alive, monkeypatch):
    """Counted in the backward pass, where the buffers are filled."""
    living, most, add = [], [], streaming.add_one

    def noted(factor, buffer, gradient):
        living.append(ref(gradient))
        most.append(sum(one() is not None for one in living))
        add(factor, buffer, gradient)

    monkeypatch.setattr(streaming, "add_one", noted)
    step = step_of(2, eager=True, **options)
    step(*BATCH)
    pieces = options.get("pieces", 1)
    assert len(most) == (4 * pieces if alive == 1 else 0)  # without the stream, all are there together
    assert max(most, default=4) <= alive
    step.reset()


def test_a_lambda_and_a_function_whose_source_is_not_there():
    network, loss = MLP(seed=0), nn.CrossEntropyLoss()
    step = make_train_step((lambda x, y: loss(network(x), y)), sgd(network), 2, eager=True)
    made = eval("lambda x, y: loss(network(x), y)", {"loss": loss, "network": network})
    other = make_train_step(made, sgd(network), 2, eager=True)
    for each in (step, other):
        assert np.isfinite([float(value) for value in each.epoch([tensors(*one) for one in batches([4, 2])])]).all()
    with pytest.raises(TypeError, match="forward_fn is a lambda"):
        make_train_step(made, sgd(network), 2)


class Stopped(Exception):
    """What a test raises in the middle."""


class Break(nn.Cell):
    """The identity, whose backward pass raises an error."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def construct(self, x):
        return x * 1.0

    def bprop(self, x, out, dout):
        raise self.error


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("error", [Stopped("stopped"), KeyboardInterrupt()])
def test_what_stops_a_pass_is_noticed_and_its_hooks_add_nothing_later(place, error):
    """An error before the backward pass changes nothing, one inside it needs a reset. Control: a run without it."""
    stops, network = [False], MLP(seed=0)
    broken, loss = Break(error), nn.CrossEntropyLoss()

    def forward_fn(x, y):
        if stops[0] and place == "forward":
            raise error
        hidden = network.first(x)
        return loss(network.second(ops.tanh(broken(hidden) if stops[0] else hidden)), y)

    step = make_train_step(forward_fn, sgd(network), 3, eager=True)
    step(*BATCH)
    stops[0] = True
    with pytest.raises((type(error), RuntimeError)):
        step(*BATCH)
    stops[0] = False
    if place == "backward":
        with pytest.raises(RuntimeError, match=r"the open window may hold a part of it; call reset\(\)"):
            step(*BATCH)
        step.reset()
        step(*BATCH)
    for _ in range(2):
        step(*BATCH)
    plain = MLP(seed=0)
    list(make_train_step(mean_loss(plain), sgd(plain), 3, eager=True).epoch([BATCH] * 3))
    assert step.update_step == 1
    assert difference(values(network.trainable_params()), values(plain.trainable_params())) < 1e-6


def test_a_gradient_that_comes_twice_is_an_error():
    """Control: once."""
    network = MLP(seed=0)
    grad_fn = ms.grad(mean_loss(network), None, ms.ParameterTuple(network.trainable_params()))

    class Twice(nn.Cell):
        def construct(self, x):
            return x * 1.0

        def bprop(self, x, out, dout):
            grad_fn(*BATCH)
            return (dout,)

    twice, loss = Twice(), nn.CrossEntropyLoss()

    def forward_fn(x, y):
        return loss(network.second(twice(network.first(x))), y)

    step = make_train_step(forward_fn, sgd(network), 3, eager=True)
    with pytest.raises(RuntimeError, match="a gradient came twice in one backward pass, so it was added twice"):
        step(*BATCH)
    step.reset()
    step = make_train_step(mean_loss(network), sgd(network), 3, eager=True)
    step(*BATCH)
    step.reset()

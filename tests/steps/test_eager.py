"""Train steps that run op by op: any Python, interrupts, and what they need. Whole runs: test_differential.py."""
import random
from contextlib import suppress
from dataclasses import dataclass

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.differential.cases import compose
from support.differential.optimizers import COMPILED_ONLY, OPTIMIZERS, build_optimizer
from support.modes import compiled_graphs, recorded_warnings
from support.processes import MEMORY, run_python
from support.training import sgd, step_of

from ms_accum import Accumulator, TrainOneStepCell, load_checkpoint, make_train_step, mindspore_api, save_checkpoint
from ms_accum.core.stream import Stream
from ms_accum.selftest.comparing import difference, relative, values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.core
SIZES = [4, 4, 2, 3, 1]


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


def built(name, network):
    case = compose(random.Random(0).choice, driver="hand-pynative", optimizer=name, level="none", loss="mean",
                   factor=1.0, groups=False, rates="number")
    return build_optimizer(case, network.trainable_params())


def plain(name, network):
    """The parameters after training on windows of two microbatches as undivided batches."""
    loss, optimizer, given = mean_loss(network), built(name, network), batches(SIZES)
    grad_fn = ms.value_and_grad(loss, None, optimizer.parameters)
    for i in range(0, len(given), 2):
        optimizer(grad_fn(*tensors(*map(np.concatenate, zip(*given[i:i + 2]))))[1])
    return values(network.trainable_params())


def by_step(optimizer, network):
    step = make_train_step(mean_loss(network), optimizer, 2, eager=True)
    for _ in step.epoch([tensors(*batch) for batch in batches(SIZES)]):
        pass


def by_gradients(optimizer, network):
    accumulator = Accumulator(optimizer, 2, reduction="mean")
    grad_fn = ms.value_and_grad(mean_loss(network), None, accumulator.weights)
    for batch in batches(SIZES):
        accumulator(grad_fn(*tensors(*batch))[1], len(batch[0]))
    accumulator.flush()


WAYS = [by_step, by_gradients]


@pytest.mark.parametrize(("train", "optimizers"), [
    *((train, slice(i, None, 2)) for i, train in enumerate(WAYS)),  # each optimizer once
    *(pytest.param(train, slice(None), marks=pytest.mark.slow) for train in WAYS)])
def test_every_optimizer_trains_as_on_the_undivided_batch(train, optimizers, uncompiled):
    trained = [name for name in OPTIMIZERS if name not in COMPILED_ONLY]
    assert len(trained) > 20
    for name in trained[optimizers]:
        network = MLP(seed=0)
        start = values(network.trainable_params())
        train(built(name, network), network)
        expected = plain(name, MLP(seed=0))
        assert difference(values(network.trainable_params()), expected) <= 1e-5, name
        assert min(relative([one], [other]) for one, other in zip(start, expected)) > 1e-4, name


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"on_nonfinite": "skip_microbatch"}, {"pieces": 2}])
def test_any_python_trains_as_on_the_undivided_batch(options):
    """Plain: the sums of all samples' gradients, divided. Controls: a mean of means; no graph is compiled."""
    chosen, network = [], MLP(seed=0)
    before = compiled_graphs()
    step = make_train_step(routed(network, chosen), sgd(network), 2, eager=True, **options)
    losses = [float(loss) for loss in step.epoch(data())]
    assert compiled_graphs() <= before + 1  # nn.SGD compiles itself
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


def test_a_gradient_inside_the_loss_is_no_gradient_of_the_loss():
    """Of the network's weights. Control: without the penalty."""
    def penalised(network, factor):
        def loss(x, y):
            return (network(x) ** 2).mean()

        inner = ms.grad(loss, None, ms.ParameterTuple(network.trainable_params()))

        def forward_fn(x, y):
            total = loss(x, y)
            for gradient in inner(x, y) if factor else ():
                total = total + factor * (gradient**2).sum()
            return total
        return forward_fn

    batch = tensors(*batches([6])[0])
    trained = []
    for factor, eager in ((0.5, True), (0.5, False), (0.0, True)):
        network = MLP(seed=0)
        forward_fn = penalised(network, factor)
        if eager:
            step = make_train_step(forward_fn, sgd(network), 2, eager=True)
            losses = [float(step(*batch)) for _ in range(2)]
        else:
            optimizer = sgd(network)
            value, gradients = ms.value_and_grad(forward_fn, None, optimizer.parameters)(*batch)
            optimizer(gradients)
            losses = [float(value)] * 2
        trained.append((losses, values(network.trainable_params())))
    assert trained[0][0] == pytest.approx(trained[1][0], rel=1e-6)
    assert difference(trained[0][1], trained[1][1]) <= 1e-6
    assert difference(trained[0][1], trained[2][1]) > 1e-3


def test_a_lambda_and_a_function_whose_source_is_not_there():
    network, loss = MLP(seed=0), nn.CrossEntropyLoss()
    step = make_train_step((lambda x, y: loss(network(x), y)), sgd(network), 2, eager=True)
    made = eval("lambda x, y: loss(network(x), y)", {"loss": loss, "network": network})
    other = make_train_step(made, sgd(network), 2, eager=True)
    for each in (step, other):
        assert np.isfinite([float(value) for value in each.epoch([tensors(*one) for one in batches([4, 2])])]).all()
    with pytest.raises(TypeError, match="forward_fn is a lambda"):
        make_train_step(made, sgd(network), 2)


def test_a_mode_that_changes_and_a_network_that_nobody_finds_need_no_warning(recwarn):
    network = nn.SequentialCell(nn.Dense(6, 3), nn.Dropout(p=0.5))
    hidden = {"any": iter([network] * 99)}
    step = make_train_step(lambda x, y: nn.CrossEntropyLoss()(next(hidden["any"])(x), y), sgd(network), 2, eager=True)
    batch = tensors(*batches([64])[0])
    network.set_train(False)
    assert float(step(*batch)) == float(step(*batch)) or step.updated
    network.set_train()
    assert len({float(step(*batch)) for _ in range(2)}) == 2
    assert not [warning for warning in recwarn if "was found" in str(warning.message)]
    step.flush()


class Stopped(Exception):
    """What a test raises in the middle."""


def breaking(error):
    class Break(nn.Cell):
        def construct(self, x):
            return x * 1.0

        def bprop(self, x, out, dout):
            raise error

    return Break()


@pytest.mark.parametrize("build", [
    lambda network, forward_fn: make_train_step(forward_fn, sgd(network), 2, eager=True),
    lambda network, forward_fn: TrainOneStepCell(_Cell(network, forward_fn), sgd(network), 2)], ids=["step", "cell"])
def test_an_error_in_the_forward_pass_changes_nothing_and_one_in_the_backward_pass_is_never_applied(build):
    network, failing = MLP(seed=0), []
    loss_fn = nn.CrossEntropyLoss()

    def forward_fn(x, y):
        if "forward" in failing:
            raise Stopped
        hidden = ops.tanh(network.first(x))
        if "backward" in failing:
            hidden = breaking(Stopped())(hidden)
        return loss_fn(network.second(hidden), y)

    step = build(network, forward_fn)
    first, second = (tensors(*batch) for batch in batches([4, 2]))
    step(*first)
    before = [buffer.asnumpy() for buffer in step.accumulator.window.buffers]
    before_update = values(network.trainable_params())
    failing.append("forward")
    with pytest.raises(Stopped):
        step(*second)
    assert difference([buffer.asnumpy() for buffer in step.accumulator.window.buffers], before) == 0
    assert step.status().unfinished == 0
    failing[:] = ["backward"]
    with suppress(Stopped):
        step(*second)
        pytest.fail("nothing was raised")
    assert mindspore_api.executor.enable_grad()  # or all later gradients are refused
    failing.clear()
    with pytest.raises(RuntimeError, match="may hold only some pieces"):
        step(*second)
    with pytest.raises(RuntimeError, match="may hold only some pieces"):
        step.flush()
    step.accumulator.reset()
    gradients = []
    grad_fn = ms.value_and_grad(mean_loss(network), None, step.accumulator.weights)
    for batch in (first, second):
        gradients.append([len(batch[0]) * gradient for gradient in values(grad_fn(*batch)[1])])
        step(*batch)
    # The hooks of the torn backward pass, which MindSpore does not remove, add nothing: neither here nor in a graph.
    wanted = [start - 0.1 * (one + other) / 6 for start, one, other in zip(before_update, *gradients)]
    assert difference(values(network.trainable_params()), wanted) <= 1e-6
    assert step.status().update_step == 1
    assert difference(values(ms.jit(grad_fn)(*first)[1]), values(grad_fn(*first)[1])) <= 1e-6


def test_an_update_after_an_error_in_a_forward_pass_is_made():
    """Control: after another's error MindSpore records on, and its AdamWeightDecay changes nothing."""
    def build(network, **options):
        return nn.AdamWeightDecay(network.trainable_params(), 0.1, **options)

    def fails(x, y):
        network(x)
        raise Stopped

    def moved(act):
        before = values(network.trainable_params())
        act()
        return difference(values(network.trainable_params()), before)

    network, failing = MLP(seed=0), []
    loss, batch = mean_loss(network), tensors(*batches([4])[0])
    step = make_train_step(lambda x, y: fails(x, y) if failing else loss(x, y), build(network), 9, eager=True)
    step(*batch)
    failing.append(1)
    with suppress(Stopped):  # not `pytest.raises`, which compiles a graph, and so switches recording off
        step(*batch)
    grad_fn = ms.value_and_grad(loss, None, step.accumulator.weights)
    assert moved(lambda: build(network)(grad_fn(*batch)[1])) > 1e-2
    assert not mindspore_api.executor.grad_flag()
    assert moved(step.flush) > 1e-2
    try:
        with suppress(Stopped):
            ms.value_and_grad(fails, None, step.accumulator.weights)(*batch)
        gradients = grad_fn(*batch)[1]
        plain = build(network)
        assert moved(lambda: plain(gradients)) == 0
    finally:
        mindspore_api.abandon()


class _Cell(nn.Cell):
    def __init__(self, network, forward_fn):
        super().__init__(auto_prefix=False)
        self.network, self.forward_fn = network, forward_fn

    def construct(self, x, y):
        return self.forward_fn(x, y)


def test_a_gradient_that_comes_twice_in_a_backward_pass_is_never_applied():
    """Control: once, it is added."""
    network, batch = MLP(seed=0), tensors(*batches([4])[0])
    accumulator, loss = Accumulator(sgd(network), 2, reduction="mean"), mean_loss(network)
    grad_fn, stream = ms.value_and_grad(loss, None, accumulator.weights), Stream(accumulator.window)
    accumulator.window.begin(Tensor(0.0))
    with pytest.raises(RuntimeError, match=r"came more than once in one backward pass.*reset\(\)"):
        stream(1.0, lambda: (stream.start(), grad_fn(*batch), grad_fn(*batch)))
    with pytest.raises(RuntimeError, match="may hold only some pieces"):
        accumulator.flush()
    accumulator.reset()
    accumulator.window.begin(Tensor(0.0))
    stream(1.0, lambda: (stream.start(), grad_fn(*batch)))
    expected = values(grad_fn(*batch)[1])
    assert difference([b.asnumpy() * float(accumulator.window.unit) for b in accumulator.window.buffers], expected) == 0
    accumulator.reset()


@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "skip_microbatch"}])
def test_a_parameter_without_a_gradient_stays(options):
    """Streamed, and whole for a stage that looks at gradients, which gets 0 for it."""
    network = MLP(seed=0)
    start = values(network.trainable_params())
    step = make_train_step(lambda x: network.first(x).mean(), sgd(network), 2, eager=True, **options)
    for batch in batches([4, 2]):
        step(tensors(*batch)[0])
    moved = [bool((one != other).any()) for one, other in zip(start, values(network.trainable_params()))]
    assert moved == [True, True, False, False]


def test_in_graph_mode_it_is_refused(mode_named):
    step = step_of(2, eager=True)
    mode_named("graph")
    with pytest.raises(RuntimeError, match=r"eager=True was called in graph mode, .*PYNATIVE_MODE"):
        step(*tensors(*batches([4])[0]))
    mode_named("pynative")
    step(*tensors(*batches([4])[0]))
    assert step.flush()


@pytest.mark.parametrize(("returned", "match"), [
    (lambda loss: float(loss), "forward_fn returned a value of type float.*without float"),
    (lambda loss: None, "returned None"),
    (lambda loss: (loss, loss), "returned 2 values"), (lambda loss: loss.reshape(1), r"loss of shape \(1,\)")])
def test_a_forward_function_that_returns_no_loss_is_refused(returned, match):
    network = MLP(seed=0)
    loss = mean_loss(network)
    step = make_train_step(lambda x, y: returned(loss(x, y)), sgd(network), 2, eager=True)
    with pytest.raises((TypeError, ValueError), match=match):
        step(*tensors(*batches([4])[0]))
    assert step.status().trained == 0


@pytest.mark.parametrize(("eager", "fails_in"), [(True, "loss"), (True, None), (False, "reading"), (True, "reading")])
def test_statistics_that_a_stopped_microbatch_has_moved_are_warned_of(eager, fails_in):
    """If it is trained again, they move twice; all else is right. Controls: no error, or one between microbatches."""
    data, found = [tensors(*batch) for batch in batches([4] * 6)], []
    for fails in (False, True):
        network, at = nn.SequentialCell(nn.BatchNorm1d(6), MLP(seed=0)).set_train(), []
        forward_fn = mean_loss(network)

        def failing(x, y, forward_fn=forward_fn, at=at, fails=fails):
            loss = forward_fn(x, y)
            at.append(1)
            if fails and fails_in == "loss" and len(at) == 4:
                raise KeyboardInterrupt
            return loss

        def read(fails=fails):
            for i, batch in enumerate(data):
                if fails and fails_in == "reading" and i == 3:
                    raise KeyboardInterrupt
                yield batch

        step = make_train_step(failing if eager else forward_fn, sgd(network), 2, eager=eager, network=network)
        with recorded_warnings() as caught:
            try:
                for _ in step.epoch(read()):
                    pass
            except KeyboardInterrupt:
                list(step.epoch(data, resume=True))
        found.append((values(network.trainable_params()), network[0].moving_mean.asnumpy()))
        assert [str(each.message)[:52] for each in caught] == (fails and fails_in == "loss") * [
            "an error or an interrupt stopped a microbatch, perha"]
    assert difference(found[0][0], found[1][0]) == 0
    assert (difference([found[0][1]], [found[1][1]]) > 1e-4) == (fails_in == "loss")


@pytest.mark.slow
def test_a_compiled_step_goes_on_with_the_file_of_an_eager_one_bit_for_bit(tmp_path):
    def start(eager):
        network = MLP(seed=0)
        return network, make_train_step(mean_loss(network), nn.Adam(network.trainable_params(), 0.01), 4, eager=eager)

    given = [tensors(*batch) for batch in batches(SIZES * 2)]
    network, step = start(True)
    for batch in given[:6]:
        step(*batch)
    save_checkpoint(tmp_path / "run.safetensors", network, step)
    for batch in given[6:]:
        step(*batch)
    step.flush()
    for eager in (True, False):
        other, resumed = start(eager)
        load_checkpoint(tmp_path / "run.safetensors", other, resumed)
        for batch in given[6:]:
            resumed(*batch)
        resumed.flush()
        off = relative(values(other.trainable_params()), values(network.trainable_params()))
        assert off == 0 if eager else off <= 1e-6


@pytest.mark.slow
def test_peak_memory_grows_by_two_weights_for_a_layer():
    """Its weight and its buffer. Control: by hand, where all gradients are held, by three."""
    def growth(way):
        peaks = [float(run_python(MEMORY, "layers", way, str(layers))) for layers in (8, 24)]
        return (peaks[1] - peaks[0]) / 16

    for way in ("eager", "eager tokens", "cell"):
        assert growth(way) <= 2.1, way
    assert 2.9 <= growth("by hand") <= 3.2

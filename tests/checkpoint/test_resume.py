"""Resumed runs are bit-identical, wherever they were saved; places, rates, memory: each sentence held and broken."""
import os
import re
from itertools import chain, repeat

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.experimental import optim
from mindspore.train import Callback, Model
from safetensors import safe_open
from support.modes import recorded_warnings

from ms_accum import (
    CheckpointError,
    FlushCallback,
    Stage,
    TrainOneStepCell,
    load_checkpoint,
    make_train_step,
    save_checkpoint,
)
from ms_accum.core.window import CLOSING, change
from ms_accum.selftest.networks import MLP

rng = np.random.default_rng(0)
BATCHES = [(rng.normal(size=(n, 6)).astype(np.float32), rng.normal(size=(n, 3)).astype(np.float32),
            (rng.random(n) < 0.7).astype(np.float32)) for n in (8, 8, 8, 5, 8, 5, 8, 8, 5)]
EQUAL = [batch for batch in BATCHES if len(batch[0]) == 8]
PATH, MIDDLE = "run.safetensors", "middle.safetensors"


def build(optimizer=None, accumulate_step=4, network=None, **options):
    """A network and its train step: ragged batches, weights by token, clipped, Adam."""
    network = network or MLP()
    optimizer = optimizer(network) if optimizer else nn.Adam(network.trainable_params(), 0.01)

    def forward_fn(x, y, mask):
        return (((network(x) - y) ** 2).mean(-1) * mask).sum() / mask.sum()

    def tokens(x, y, mask):
        return mask.sum()

    return network, make_train_step(forward_fn, optimizer, accumulate_step, weight_fn=tokens,
                                    **{"clip_norm": 0.2, **options})


def state(network, step):
    window = step.boundary.window
    held = (*network.get_parameters(), *step.boundary.rates.state.values(), *window.state.values(), window.counts,
            window.sums)
    return [p.asnumpy().tobytes() for p in held]


def train(step, epochs=2, batches=BATCHES):
    while step.epochs < epochs:
        for _ in step.epoch(batches, skip=step.trained):
            pass


def resumed(path, network, step, epochs=2):
    load_checkpoint(path, network, step)
    train(step, epochs)
    return state(network, step)


def saved(*arguments, **named):
    """Save, and return the warning."""
    with recorded_warnings() as caught:
        save_checkpoint(*arguments, **named)
    return " ".join(str(w.message) for w in caught if "microbatch" in str(w.message))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two epochs of nine microbatches, saved after each of them and in each update."""
    folder, (network, step) = tmp_path_factory.mktemp("run"), build()
    updates, bodies = [], []

    @step.on_update
    def save(step):
        updates.append(str(folder / f"u{step.update_step}.safetensors"))
        assert saved(updates[-1], network, step, extra={"update": step.update_step}) == ""

    for _ in range(2):
        for _ in step.epoch(BATCHES):
            path, held = str(folder / f"b{len(bodies)}.safetensors"), step.status().mini_step
            bodies.append((path, held, saved(path, network, step)))
    step.boundary.functions.clear()
    return network, step, updates, bodies, state(network, step)


def test_a_save_after_each_microbatch_and_in_each_update_is_resumed_bit_for_bit(run):
    """In a new run, which compiles other graphs, and in the one that has trained. Control: other batches."""
    _, _, updates, bodies, end = run
    for network, step in (build(), run[:2]):
        files = [*updates, *(path for path, *_ in bodies)]
        assert len(files) == 6 + 18
        assert [path for path in files if resumed(path, network, step) != end] == []
        assert load_checkpoint(updates[0], network, step) == {"update": 1}
        step(*BATCHES[5])
        train(step)
        assert state(network, step) != end


def test_a_save_in_an_open_window_warns_and_holds_no_gradients(run):
    for path, held, warned in run[3]:
        expected = "1 microbatch of the open window is" if held == 1 else f"{held} microbatches of the open window are"
        assert warned == "" if held == 0 else (
            f"{path} holds the state of the last update: {expected} trained again: skip `train_step.trained` batches "
            "after the load, not a count of your own; save in `on_update` to lose nothing" == warned)
        with safe_open(path, "np") as file:
            names = set(file.keys())
        assert names - {f"optimizer:{name}" for name in run[1].boundary.rates.state} == {
            "first.weight", "first.bias", "second.weight", "second.bias", "accumulator:counts", "accumulator:sums",
            "accumulator:seen"}
        assert os.path.getsize(path) < 12 * 53 + 8192


@pytest.mark.parametrize("options", [
    {"eager": True}, {"accumulate_step": {0: 1, 2: 3}, "eager": True}, {"accumulate_step": 1, "eager": True},
    pytest.param({"pieces": 2}, marks=pytest.mark.slow), pytest.param({"accumulate_step": 1}, marks=pytest.mark.slow),
    {"loss_scaler": lambda: amp.DynamicLossScaler(2.0**10, 2, 2), "eager": True}])
def test_other_ways_are_resumed_bit_for_bit(options):
    made = [build(**{k: v() if k == "loss_scaler" else v for k, v in options.items()}) for _ in range(2)]
    (network, step), other = made
    for number, _ in enumerate(step.epoch(BATCHES)):
        if number in (1, 4):
            saved(f"{number}.safetensors", network, step)
    for number in (1, 4):
        assert resumed(f"{number}.safetensors", *other, epochs=1) == state(network, step)


def test_another_accumulate_step_takes_the_file(run):
    network, step = build(accumulate_step=2)
    load_checkpoint(run[3][5][0], network, step)
    assert (step.trained, step.update_step) == (4, 1)
    train(step, 1)
    assert step.update_step == 4


# --- the place --------------------------------------------------------------------------------------------------------

def test_a_file_inside_an_epoch_is_the_one_thing_that_is_remembered(run):
    network, step, _, bodies, end = run
    path = bodies[5][0]
    load_checkpoint(path, network, step)
    assert (step.trained, step.epochs, step.update_step) == (4, 0, 1)
    with pytest.raises(RuntimeError, match=r"stopped after 4 batches of an epoch; .* skip=train_step.trained"):
        next(step.epoch(BATCHES))
    with pytest.raises(ValueError, match="ended after 3 batches, expected the 4"):
        next(step.epoch(BATCHES[:3], skip=step.trained))
    list(step.epoch(chain(repeat(None, 4), BATCHES[4:]), skip=step.trained))
    assert step.trained == 0
    list(step.epoch(BATCHES))
    assert state(network, step) == end
    load_checkpoint(path, network, step)
    losses = list(step.epoch(BATCHES, skip=0))
    assert (len(losses), step.epochs, step.trained) == (9, 1, 0)
    load_checkpoint(bodies[8][0], network, step)  # at the last loss
    assert (step.trained, step.epochs) == (0, 1)


def test_a_load_in_the_body_or_in_an_update_ends_the_loop(run):
    network, step, updates, _, end = run
    load_checkpoint(updates[0], network, step)
    loop = step.epoch(BATCHES, skip=step.trained)
    next(loop)
    load_checkpoint(updates[0], network, step)
    with pytest.raises(RuntimeError, match=r"inside this loop over train_step.epoch, which owns it"):
        next(loop)
    step.on_update(lambda step: load_checkpoint(updates[0], network, step))
    with pytest.raises(RuntimeError, match="inside a function of on_update, which owns it"):
        train(step)
    step.boundary.functions.clear()
    assert resumed(updates[0], network, step) == end


def test_what_was_torn_is_saved_if_it_is_a_microbatch_and_loaded_over_in_any_case(run):
    network, step, updates, _, end = run
    counts = step.boundary.window.counts

    def tear(mark):
        load_checkpoint(updates[0], network, step)
        loop = step.epoch(BATCHES, skip=step.trained)
        next(loop)
        ops.assign(counts, counts + change(MARK=mark))

    tear(1)
    with pytest.raises(RuntimeError, match="stopped a microbatch"):
        step.status()
    assert "2 microbatches of the open window are trained again" in saved(MIDDLE, network, step)
    assert resumed(MIDDLE, network, step) == end
    tear(1)
    step.reset()
    assert step.trained == 4
    train(step)
    assert state(network, step) == end
    tear(CLOSING)
    with pytest.raises(RuntimeError, match="stopped an update"):
        save_checkpoint(MIDDLE, network, step)
    assert resumed(updates[0], network, step) == end


def test_a_load_that_fails_midway_leaves_a_run_that_trains_no_more(run, monkeypatch):
    network, step, updates, _, end = run

    def fail(*_):
        raise OSError("the disk")

    with monkeypatch.context() as patch:
        patch.setattr("ms_accum.checkpoint.checkpoint.synchronize", fail)
        with pytest.raises(OSError, match="the disk"):
            load_checkpoint(updates[0], network, step)
    for do in (step.flush, step.status, lambda: step(*BATCHES[0]), lambda: save_checkpoint(PATH, network, step)):
        with pytest.raises(RuntimeError, match="stopped a load"):
            do()
    assert resumed(updates[0], network, step) == end


def test_a_window_that_was_saved_is_not_lost(run):
    network, step, updates, _, _ = run
    load_checkpoint(updates[0], network, step)
    step(*BATCHES[0])
    step.boundary.saved[0] = -1
    saved(PATH, network, step)
    assert step.boundary.saved[0] == step.boundary.added
    step.reset()


def test_an_error_in_a_function_that_saves_is_the_users(run):
    """The microbatch and its update stand, and no graph is forgotten."""
    network, step, updates, _, end = run
    load_checkpoint(updates[0], network, step)
    graphs = step.boundary.graphs

    @step.on_update
    def save(step):
        save_checkpoint("missing/run.safetensors", network, step)

    with pytest.raises(FileNotFoundError, match="missing does not exist"):
        train(step)
    step.boundary.functions.clear()
    assert step.boundary.graphs is graphs
    assert (step.trained, step.update_step) == (8, 2)
    train(step)
    assert state(network, step) == end


def test_a_cell_says_how_model_goes_on():
    """Saved after each microbatch, in an open window too. Control: without the skip."""
    class Save(Callback):
        def on_train_step_end(self, run_context):
            path = f"{cell.status().epochs}.{cell.status().trained}.safetensors"
            files.append((path, cell.status().mini_step, saved(path, network, cell)))

    def make():
        network = MLP()
        return network, TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), nn.Adam(network.trainable_params(),
                                                                                         0.01), 4)

    def fit(cell, epochs, skip=0, *callbacks):
        data = GeneratorDataset([batch[:2] for batch in BATCHES], ["x", "y"], shuffle=False)
        Model(cell).train(epochs, data.skip(skip) if skip else data, callbacks=[FlushCallback(), *callbacks],
                          dataset_sink_mode=False)

    files, (network, cell) = [], make()
    fit(cell, 2, 0, Save())
    end, other = state(network, cell), make()
    assert [held > 0 for _, held, _ in files[:5]] == [True, True, True, False, True]
    assert files[1][2] == ("0.2.safetensors holds the state of the last update: 2 microbatches of the open window are "
                           "trained again: call model.train(1, dataset.skip(cell.status().trained), ...) after the "
                           "load, not a count of your own; save in `PerUpdate` to lose nothing")
    for path, _, _ in (files[1], files[5], files[12]):
        load_checkpoint(path, *other)
        status = other[1].status()
        fit(other[1], 1, status.trained)
        if status.epochs == 0:
            fit(other[1], 1)
        assert state(*other) == end
    load_checkpoint(files[5][0], *other)
    fit(other[1], 1)
    assert state(*other) != end


def test_files_of_other_ranks(run):
    """Of the former split, only rank 0's place is known. Control: a file between two epochs has no split."""
    network, step, _, bodies, _ = run
    exchange = step.boundary.window.exchange
    try:
        exchange.gathered = lambda value: [value, [0, 3, 8.0]]
        load_checkpoint(bodies[5][0], network, step)
        saved(MIDDLE, network, step)
        load_checkpoint(bodies[8][0], network, step)
        exchange.gathered = lambda value: [value, [1, 0, 8.0]]
        saved(PATH, network, step)
    finally:
        del exchange.gathered
    load_checkpoint(MIDDLE, network, step)
    with pytest.raises(RuntimeError, match=r"another number of ranks.* \(4\) counts rank 0's batches of the former sp"):
        next(step.epoch(BATCHES))
    load_checkpoint(PATH, network, step)
    next(step.epoch(BATCHES))
    step.reset()


# --- rates ------------------------------------------------------------------------------------------------------------

class Both(nn.Cell):
    """Two optimizers, one with a list of rates."""

    def __init__(self, network, rate=0.1, rates=(0.01, 0.02, 0.03, 0.04, 0.05)):
        super().__init__(auto_prefix=False)
        weights = network.trainable_params()
        self.first, self.second = nn.Momentum(weights[:2], rate, 0.9), nn.Adam(weights[2:], list(rates))
        self.parameters = ms.ParameterTuple(weights)

    def construct(self, gradients):
        self.first(gradients[:2])
        self.second(gradients[2:])
        return True


def groups(kind, rate, **options):
    def make(network):
        weights = network.trainable_params()
        return kind([{"params": weights[:2], "lr": 0.3}, {"params": weights[2:]}], rate, **options)
    return make


def with_list(network):
    return nn.Adam(network.trainable_params(), [0.01, 0.02, 0.03, 0.04])


def with_schedule(network):
    return nn.Momentum(network.trainable_params(), nn.ExponentialDecayLR(0.1, 0.5, 1), 0.9)


RATES = {  # the optimizer, with another rate, what is set in training
    "nn groups": (groups(nn.Momentum, 0.1, momentum=0.9), groups(nn.Momentum, 0.2, momentum=0.9), (0.05, 0.06)),
    "experimental": (groups(optim.AdamW, 0.1), groups(optim.AdamW, 0.2), (0.05, 0.06)),
    "list": (with_list, None, None), "schedule": (with_schedule, None, None),
    "composite": (Both, lambda network: Both(network, 0.2), None)}


@pytest.mark.parametrize("case", RATES)
def test_rates_of_the_file_win_and_a_warning_names_those_that_differ(case):
    make, other, now = RATES[case]
    options = {"eager": case != "composite", "clip_norm": None, "accumulate_step": 2}
    network, step = build(make, **options)
    if now:
        step.learning_rate = now
    for number, _ in enumerate(step.epoch(EQUAL)):
        if number == 2:
            saved(PATH, network, step)
            rates = step.learning_rate
    end = state(network, step)
    network, step = build(other or make, **options)
    with recorded_warnings() as caught:
        load_checkpoint(PATH, network, step)
    said = [str(w.message) for w in caught]
    assert len(said) == (other is not None)
    if other:
        assert re.search(r"is 0\.2 here, was 0\.1 there, and is 0\.[01]\d* in the file", said[0])
        assert 'set train_step.learning_rate after the load, or give load_checkpoint(..., rates="script")' in said[0]
    train(step, 1, EQUAL)
    assert state(network, step) == end
    if other:
        network, step = build(other, **options)
        given = step.learning_rate
        with recorded_warnings() as caught:
            load_checkpoint(PATH, network, step, rates="script")
        assert not caught
        assert step.learning_rate[0 if case == "composite" else 1] == given[0 if case == "composite" else 1] == 0.2
        train(step, 1, EQUAL)
        assert state(network, step) != end  # control
    else:
        load_checkpoint(PATH, network, step)
        assert step.learning_rate == rates


def test_a_rate_that_was_set_in_training_is_loaded_without_a_warning():
    network, step = build(eager=True)
    step.learning_rate = 0.005
    save_checkpoint(PATH, network, step)
    network, step = build(eager=True)
    with recorded_warnings() as caught:
        load_checkpoint(PATH, network, step)
    assert not caught
    assert step.learning_rate == 0.005
    with pytest.raises(ValueError, match="rates is 'mine', expected one of 'file', 'script'"):
        load_checkpoint(PATH, network, step, rates="mine")


# --- memory, names and shapes -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("eager", [False, True])
def test_parameters_that_were_given_new_memory_are_an_error_of_each_save_and_load(eager):
    network, step = build(eager=eager, accumulate_step=1)
    network.first.bias.set_data(Tensor(np.ones(5, np.float32)))  # before the first update, it may be
    step(*BATCHES[0])
    save_checkpoint(PATH, network, step)
    network.first.weight.set_data(Tensor(np.ones(network.first.weight.shape, np.float32)))
    for do in (lambda: save_checkpoint(PATH, network, step), lambda: load_checkpoint(PATH, network, step), step.flush):
        with pytest.raises(RuntimeError, match=r"first.weight was given new memory"):
            do()


@ms.jit_class
class Summed(Stage):
    """A stage with state."""

    def __init__(self, shape=()):
        self.total = Parameter(Tensor(np.zeros(shape, np.float32)), name="total", requires_grad=False)
        self.state = (self.total,)

    def on_update(self, window):
        ops.assign_add(self.total, window["gradients"][0].sum() + ops.zeros_like(self.total))


def test_another_run_is_an_error_that_names_the_entry():
    """Nothing is loaded. Control: the same run."""
    network, step = build(eager=True, stages=(Summed(),))
    list(step.epoch(BATCHES[:4]))
    save_checkpoint(PATH, network, step)
    good = build(eager=True, stages=(Summed(),))
    load_checkpoint(PATH, *good)
    assert state(*good) == state(network, step)
    for entry, held, wanted, made in [
            ("first.weight", r"of float32 \(5, 6\)", r"of float32 \(4, 6\)", {"network": MLP(hidden=4)}),
            ("first.weight", "of float32", "of float16", {"network": MLP(dtype=ms.float16)}),
            ("accumulator:stage0.Summed.0", r"of float32 \(\)", "missing", {"stages": ()}),
            ("accumulator:stage0.Summed.0", r"of float32 \(\)", r"of float32 \(2,\)", {"stages": (Summed((2,)),)}),
            ("optimizer:.*", "missing", "of .*", {"optimizer": lambda n: nn.Momentum(n.trainable_params(), .1, .9)})]:
        other = build(eager=True, **{"stages": (Summed(),), **made})
        before = state(*other)
        with pytest.raises(CheckpointError, match=rf"run\.safetensors: {entry} is {held}.* in the file, but {wanted}.* "
                                                  "in this run; build network, optimizer and step with the same arg"):
            load_checkpoint(PATH, *other)
        assert state(*other) == before
    with pytest.raises(ValueError, match=r"second.weight is trained, but it is not in the network"):
        save_checkpoint(PATH, network.first, step)


def test_a_network_that_was_renamed_and_one_with_buffers_come_back():
    """Names are those of the structure; buffers are part of the file."""
    class Network(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inner = MLP()
            self.register_buffer("seen", Tensor([1.0]))

        def construct(self, x):
            return self.inner(x)

    network, step = build(eager=True, network=Network())
    ops.assign(network.seen, Tensor([5.0]))
    for i, parameter in enumerate(network.get_parameters()):
        parameter.name = f"renamed{i}"
    step(*BATCHES[0])
    saved(PATH, network, step)
    assert {"inner.first.weight", "seen"} <= ms.load_checkpoint(PATH, format="safetensors").keys()
    other = build(eager=True, network=Network())
    load_checkpoint(PATH, *other)
    assert other[0].seen.asnumpy() == [5.0]
    assert other[0].inner.first.weight.asnumpy().tolist() == network.inner.first.weight.asnumpy().tolist()


def test_the_unit_of_weights_is_the_files_and_graphs_of_another_one_are_forgotten(run):
    _, step, updates, _, end = run
    other = build()
    list(other[1].epoch([tuple(column[:3] for column in batch) for batch in BATCHES]))
    graphs = other[1].boundary.graphs
    assert (other[1].boundary.window.unit, step.boundary.window.unit) == (3, 8)
    assert resumed(updates[1], *other) == end
    assert other[1].boundary.window.unit == 8
    assert other[1].boundary.graphs is not graphs

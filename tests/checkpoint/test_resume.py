"""Resumed runs are bit-identical, wherever they were saved; what a file holds, and what it does not fit. Sentences 3-5.

Runs with other drivers, optimizers and options, saved where an epoch is stopped: test_differential.py.
"""
import os
import re
from itertools import chain, repeat

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops
from mindspore.experimental import optim
from safetensors import safe_open
from support.model_runs import make_cell
from support.modes import recorded_warnings
from support.training import bits, masked_batches, masked_step, train_epochs

from ms_accum import Accumulator, CheckpointError, load_checkpoint, save_checkpoint
from ms_accum.core.window import CLOSING, LOADING, change
from ms_accum.selftest.networks import MLP, batches, tensors

BATCHES = masked_batches((8, 8, 8, 5, 8, 5, 8, 8, 5))
PATH = "run.safetensors"


def build(optimizer=None, accumulate_step=4, network=None, **options):
    """A network and its train step: ragged batches, weights by token, clipped, Adam."""
    network = network or MLP()
    optimizer = optimizer(network) if optimizer else nn.Adam(network.trainable_params(), 0.01)
    return network, masked_step(network, optimizer, accumulate_step, **{"clip_norm": 0.2, **options})


def resumed(path, network, step):
    load_checkpoint(path, network, step)
    train_epochs(step, BATCHES)
    return bits(network, step)


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
    return network, step, updates, bodies, bits(network, step)


def test_a_save_after_each_microbatch_and_in_each_update_is_resumed_bit_for_bit(run):
    """In a new run, which compiles other graphs, and in the one that has trained. Control: other batches."""
    _, _, updates, bodies, end = run
    for network, step in (build(), run[:2]):
        files = [*updates, *(path for path, *_ in bodies)]
        assert len(files) == 6 + 18
        assert [path for path in files if resumed(path, network, step) != end] == []
        assert load_checkpoint(updates[0], network, step) == {"update": 1}
        step(*BATCHES[5])
        train_epochs(step, BATCHES)
        assert bits(network, step) != end


def test_a_save_in_an_open_window_warns_and_holds_no_gradients(run):
    """A cell says how `Model` goes on."""
    text = ("{} holds the state of the last update: {} of the open window {} trained again: {} after the load, not a "
            "count of your own; save in `{}` to lose nothing")
    for path, held, warned in run[3]:
        many = ("1 microbatch", "is") if held == 1 else (f"{held} microbatches", "are")
        assert warned == ("" if held == 0 else text.format(path, *many, "skip `train_step.trained` batches",
                                                           "on_update"))
        with safe_open(path, "np") as file:
            names = set(file.keys())
        assert names - {f"optimizer:{name}" for name in run[1].boundary.rates.state} == {
            "first.weight", "first.bias", "second.weight", "second.bias", "accumulator:counts", "accumulator:sums",
            "accumulator:seen"}
        assert os.path.getsize(path) < 12 * 53 + 8192
    network, cell = make_cell()
    cell(*tensors(*batches([4])[0]))
    assert saved(PATH, network, cell) == text.format(
        PATH, "1 microbatch", "is", "call model.train(1, dataset.skip(cell.status().trained), ...)", "PerUpdate")
    assert cell.boundary.saved == [cell.boundary.added], "or it warns of a window that is lost"


def test_what_may_change_is_taken_from_the_script(run):
    """`accumulate_step`; the unit of weights is the file's, and graphs of another one are forgotten."""
    _, step, updates, bodies, end = run
    network, other = build(accumulate_step=2, eager=True)
    load_checkpoint(bodies[5][0], network, other)
    assert (other.trained, other.update_step) == (4, 1)
    train_epochs(other, BATCHES, 1)
    assert other.update_step == 4
    network, other = build()
    list(other.epoch([tuple(column[:3] for column in batch) for batch in BATCHES]))
    graphs, units = other.boundary.graphs, [other.boundary.window.unit, step.boundary.window.unit]
    assert resumed(updates[1], network, other) == end
    assert [*units, other.boundary.window.unit] == [3, 8, 8]
    assert other.boundary.graphs is not graphs
    by_hand = Accumulator(nn.Adam(network.trainable_params(), 0.01), 4, reduction="mean")
    load_checkpoint(updates[1], network, by_hand)
    assert by_hand.window.unit == 1  # in the user's own graph


def test_a_file_inside_an_epoch_is_the_one_thing_that_is_remembered(run):
    """Controls: a file between two epochs, and an epoch that has begun again."""
    network, step, _, bodies, end = run
    load_checkpoint(bodies[5][0], network, step)
    assert (step.trained, step.epochs, step.update_step) == (4, 0, 1)
    with pytest.raises(RuntimeError, match=r"stopped after 4 batches of an epoch; .* skip=train_step.trained"):
        next(step.epoch(BATCHES))
    list(step.epoch(chain(repeat(None, 4), BATCHES[4:]), skip=step.trained))
    assert step.trained == 0
    list(step.epoch(BATCHES))
    assert bits(network, step) == end
    load_checkpoint(bodies[5][0], network, step)
    assert len(list(step.epoch(BATCHES, skip=0))) == 9
    load_checkpoint(bodies[8][0], network, step)  # at the last loss
    assert (step.trained, step.epochs) == (0, 1)
    list(step.epoch(BATCHES))
    assert bits(network, step) == end


def test_what_was_torn_is_saved_if_it_is_a_microbatch_and_loaded_over_in_any_case(run):
    network, step, updates, _, end = run

    def tear(mark):
        load_checkpoint(updates[0], network, step)
        next(step.epoch(BATCHES, skip=step.trained))
        ops.assign(step.boundary.window.counts, step.boundary.window.counts + change(MARK=mark))

    tear(1)
    assert "2 microbatches of the open window are trained again" in saved(PATH, network, step)
    assert resumed(PATH, network, step) == end
    for mark, torn in ((CLOSING, "an update"), (LOADING, "a load")):
        tear(mark)
        with pytest.raises(RuntimeError, match=f"stopped {torn}"):
            save_checkpoint(PATH, network, step)
        assert resumed(updates[0], network, step) == end


def test_files_of_other_ranks(run, monkeypatch):
    """Of the former split, only rank 0's place is known. Control: a file between two epochs has no split."""
    network, step, _, bodies, _ = run
    for path, source, place in (("middle.safetensors", bodies[5][0], [0, 3, 8.0]), (PATH, bodies[8][0], [1, 0, 8.0])):
        load_checkpoint(source, network, step)
        with monkeypatch.context() as patch:
            patch.setattr(step.boundary.window.exchange, "gathered", lambda value, other=place: [value, other])
            saved(path, network, step)
    load_checkpoint("middle.safetensors", network, step)
    with pytest.raises(RuntimeError, match=r"another number of ranks.* \(4\) counts rank 0's batches of the former sp"):
        next(step.epoch(BATCHES))
    load_checkpoint(PATH, network, step)
    next(step.epoch(BATCHES))
    step.reset()


# --- rates ------------------------------------------------------------------------------------------------------------

class Both(nn.Cell):
    """Two optimizers, one with a list of rates."""

    def __init__(self, weights, rate):
        super().__init__(auto_prefix=False)
        self.first = nn.Momentum(weights[:2], rate, 0.9)
        self.second = nn.Adam(weights[2:], [rate / 10, rate / 20, rate / 40])
        self.parameters = ms.ParameterTuple(weights)

    def construct(self, gradients):
        self.first(gradients[:2])
        self.second(gradients[2:])
        return True


def groups(kind, **options):
    def make(weights, rate):
        return kind([{"params": weights[:2], "lr": 0.3}, {"params": weights[2:]}], rate, **options)
    return make


@pytest.mark.parametrize("kind", [groups(nn.Momentum, momentum=0.9), groups(optim.AdamW), Both],
                         ids=["nn", "experimental", "composite"])
def test_rates_of_the_file_win_and_a_warning_names_those_that_differ(kind):
    """Not what is in a list. A rate that was set in training is none that differs. Control: `rates="script"`."""
    def made(rate):
        return build(lambda network: kind(network.trainable_params(), rate), 1, eager=kind is not Both, clip_norm=None)

    network, step = made(0.1)
    if kind is not Both:
        step.learning_rate = (0.05, 0.06)
    step(*BATCHES[0])
    saved(PATH, network, step)
    rates = step.learning_rate
    step(*BATCHES[1])
    for rate, options, said in ((0.1, {}, 0), (0.2, {}, 1), (0.2, {"rates": "script"}, 0)):
        other, again = made(rate)
        given = again.learning_rate
        with recorded_warnings() as caught:
            load_checkpoint(PATH, other, again, **options)
        assert len(caught) == said
        assert all(re.search(r"is 0\.2 here, was 0\.1 there, and is 0\.[01]\d* in the file; .*; set train_step\."
                             r'learning_rate .*, or give load_checkpoint\(\.\.\., rates="script"\)', str(one.message))
                   for one in caught)
        expected = [*(given if options else rates)]
        if kind is Both:
            expected[1] = rate / 20  # the second of the script's list
        assert again.learning_rate == pytest.approx(expected)
        if kind is not Both or rate == 0.1:
            again(*BATCHES[1])
            assert (bits(other, again) == bits(network, step)) == (not options)
    with pytest.raises(ValueError, match="rates is 'mine', expected one of 'file', 'script'"):
        load_checkpoint(PATH, network, step, rates="mine")


# --- memory, names and shapes -----------------------------------------------------------------------------------------

def test_parameters_that_were_given_new_memory_are_an_error_of_each_save_and_load():
    """Before the first update, they may be."""
    network, step = build(eager=True, accumulate_step=1)
    network.first.bias.set_data(Tensor(np.ones(5, np.float32)))
    step(*BATCHES[0])
    save_checkpoint(PATH, network, step)
    network.first.weight.set_data(Tensor(np.ones(network.first.weight.shape, np.float32)))
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(RuntimeError, match=r"first.weight was given new memory"):
            call(PATH, network, step)


def test_another_run_is_an_error_that_names_the_entry():
    """Nothing is loaded. Control: the same run."""
    network, step = build(eager=True, loss_scaler=amp.DynamicLossScaler(8.0, 2, 9))
    list(step.epoch(BATCHES[:4]))
    save_checkpoint(PATH, network, step)
    good = build(eager=True, loss_scaler=amp.DynamicLossScaler(8.0, 2, 9))
    load_checkpoint(PATH, *good)
    assert bits(*good) == bits(network, step)
    for entry, held, wanted, made in [
            ("first.weight", r"of float32 \(5, 6\)", r"of float32 \(4, 6\)", {"network": MLP(hidden=4)}),
            ("first.weight", "of float32", "of float16", {"network": MLP(dtype=ms.float16)}),
            (r"accumulator:stage\d\.\w+\.0", "of float32", "missing", {"loss_scaler": None}),
            ("optimizer:.*", "missing", "of .*", {"optimizer": lambda n: nn.Momentum(n.trainable_params(), .1, .9)})]:
        other = build(eager=True, **{"loss_scaler": amp.DynamicLossScaler(8.0, 2, 9), **made})
        before = bits(*other)
        with pytest.raises(CheckpointError, match=rf"run\.safetensors: {entry} is {held}.* in the file, but {wanted}.* "
                                                  "in this run; build network, optimizer and step with the same arg"):
            load_checkpoint(PATH, *other)
        assert bits(*other) == before
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

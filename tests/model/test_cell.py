"""TrainOneStepCell: a ModelCheckpoint, several cells in one graph; and what it refuses.

That its updates are exact, and what it says of dropped windows, is drawn in test_differential.py; callbacks are in
test_callbacks.py.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn
from mindspore.experimental import optim
from mindspore.train import CheckpointConfig, Model, ModelCheckpoint, amp
from support.cells import Mean
from support.model_runs import TwoCells, dataset, make_cell, train
from support.modes import compiled_graphs, recorded_warnings
from support.training import LOSS, sgd

from ms_accum import TrainOneStepCell, load_checkpoint, save_checkpoint
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.modes import running
from ms_accum.selftest.networks import MLP, batches, tensors


def go_on(network, cell):
    """Train to the end of the window, and beyond; the bits of the parameters."""
    for x, y in batches([6] * 3, seed=2):
        cell(*tensors(x, y))
    cell.flush()
    return [p.asnumpy().tobytes() for p in network.trainable_params()]


@pytest.mark.slow
def test_a_model_checkpoint_holds_a_window_that_is_half_full(mode_named):
    """Loaded into a fresh cell, or with our own loading into the one that has run, training goes on to the same bits.

    Not if the window is forgotten. MindSpore's `load_param_into_net` does not reach a cell that has run.
    """
    mode_named("graph")
    network, cell = make_cell(accumulate_step=3)
    assert {p.name for p in MLP().trainable_params()} <= {p.name for p in cell.get_parameters()}, "names are kept"
    train(cell, ModelCheckpoint("run", ".", CheckpointConfig(save_checkpoint_steps=4)), data=dataset([6] * 4))
    assert int(cell.accumulator.mini_step) == 1
    save_checkpoint("window.safetensors", network, cell.accumulator)
    uninterrupted = go_on(network, cell)

    fresh_network, fresh = make_cell(accumulate_step=3)
    missing, unexpected = ms.load_param_into_net(fresh, ms.load_checkpoint("run-1_4.ckpt"))
    assert missing == unexpected == [], "names depend on what this process has built before"
    assert go_on(fresh_network, fresh) == uninterrupted

    load_checkpoint("window.safetensors", network, cell.accumulator)
    assert go_on(network, cell) == uninterrupted
    load_checkpoint("window.safetensors", network, cell.accumulator)
    cell.accumulator.reset()
    assert go_on(network, cell) != uninterrupted


def two_cells():
    return TwoCells(make_cell()[1], make_cell(accumulate_step=3)[1])


def test_two_cells_in_one_graph_have_names_of_their_own(mode_named):
    """By their place in the Cell that holds them. Each trains as it does alone; control: another window does not.

    In a function they have the names of their networks; what an optimizer names after a parameter keeps its name.
    """
    mode_named("graph")
    both = two_cells()
    names = [p.name for p in both.get_parameters()]
    assert len(set(names)) == len(names)
    assert names == [p.name for p in two_cells().get_parameters()], "names depend on what this process has built before"
    train(both, data=dataset([6] * 6))
    alone = []
    mode_named("pynative")
    for steps in (2, 3):
        network, cell = make_cell(steps)
        train(cell, data=dataset([6] * 6))
        alone.append(values(network.trainable_params()))
    trained = [values(cell.accumulator.optimizer.parameters) for cell in (both.one, both.other)]
    assert [difference(one, other) <= 1e-6 for one in trained for other in alone] == [True, False, False, True]
    names = []
    for name in ("one.", "other."):
        network = MLP()
        network.update_parameters_name(name)
        cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), nn.Adam(network.trainable_params()), 2)
        names += [p.name for p in cell.get_parameters()]
    assert len(set(names)) == len(names)
    prefix = "accumulator.one.first.weight."
    assert {f"{prefix}mini_step", f"{prefix}beta1_power", "moment1.one.first.weight"} <= set(names)


def samples_of(label):
    return len(label)


def test_what_does_not_fit_is_refused():
    network = MLP()
    optimizer = sgd(network)
    cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), optimizer, 2)
    x, y = tensors(*batches([4])[0])

    for error, message, call in (
            (TypeError, r"network is of type function, expected a Cell that returns the loss; .*make_train_step",
             lambda: TrainOneStepCell(lambda x: x, optimizer, 2)),
            (TypeError, "weight_fn is of type int, expected a function",
             lambda: TrainOneStepCell(cell.network, optimizer, 2, weight_fn=3)),
            (TypeError, r"^weight_fn\(label\) does not take the batch \(2 by position\): too many positional",
             lambda: TrainOneStepCell(cell.network, optimizer, 2, weight_fn=samples_of)(x, y)),
            (TypeError, r"got keyword arguments \(label\), expected arguments by p", lambda: cell(x, label=y)),
            (ValueError, r"give Model\(TrainOneStepCell\(\.\.\.\)\) without an optimizer",
             lambda: Model(cell, optimizer=optimizer))):
        with pytest.raises(error, match=message):
            call()
        assert cell.status().mini_step == 0


@pytest.mark.parametrize("mode", [pytest.param("graph", marks=pytest.mark.slow), "pynative"])
def test_a_microbatch_that_the_network_does_not_take_is_refused(mode, mode_named):
    """As of a Model with a loss_fn, or of a network without one. The window stays as it is.

    Before anything is compiled, except for a Model with a loss_fn: its own graph holds the cell's.
    """
    mode_named(mode)
    network = MLP()
    bare, cell = (TrainOneStepCell(each, sgd(network), 2) for each in (network, nn.WithLossCell(network, LOSS)))
    x, y = tensors(*batches([4])[0])
    graphs = compiled_graphs()
    too_few = r"^the network WithLossCell does not take .*got 1 argument, expected 2 \(data, label\); leave loss_fn out"
    too_many = r"^the network MLP does not take .*got 2 arguments, expected 1 \(x\); .*give TrainOneStepCell\(nn\.With"
    for message, call in (
            (too_few, lambda: cell(x)), (too_many, lambda: bare(x, y)), (too_many, lambda: train(bare)),
            (too_few, lambda: Model(cell, LOSS).train(1, dataset(), dataset_sink_mode=False))):
        assert compiled_graphs() == graphs
        with pytest.raises(TypeError, match=message):
            call()
        assert cell.status().mini_step == 0
    train(cell)
    assert cell.status().update_step == 2


@pytest.mark.parametrize("modes", ["ggppggg", "ppggppp", "gpgpgpp"])
def test_a_cell_follows_the_mode_of_the_context(modes, mode_named):
    """In the middle of a window, too, as a debugger may change it. Control: one mode; other data."""
    def run(modes, seed=2):
        mode_named({"g": "graph", "p": "pynative"}[modes[0]])
        network = MLP()
        cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), sgd(network), 3)
        for mode, (x, y) in zip(modes[1:], batches([6] * 6, seed=seed)):
            mode_named({"g": "graph", "p": "pynative"}[mode])
            cell(*tensors(x, y))
        return values(network.trainable_params()), int(cell.accumulator.update_step)

    found, updates = run(modes)
    assert updates == 2
    assert difference(found, run("ppppppp")[0]) < 1e-6 < 1e-4 < difference(found, run("ppppppp", 3)[0])


@pytest.mark.parametrize("between", ["nothing", "flush", "save"])
@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_an_option_that_was_changed_counts_whatever_comes_first(mode, between, mode_named, tmp_path):
    """A weight decay of 0, after which a gradient of 0 moves nothing. Control: before, it does."""
    mode_named(mode)
    network = nn.Dense(2, 1, weight_init="ones").set_train()
    optimizer = optim.SGD(network.trainable_params(), 0.1, weight_decay=0.5)
    cell = TrainOneStepCell(Mean(network).set_train(), optimizer, 1)

    def moved():
        before = network.weight.asnumpy().copy()
        cell(Tensor(np.zeros((2, 2)), ms.float32))
        return not np.array_equal(before, network.weight.asnumpy())

    assert [moved(), moved()] == [True, True]
    optimizer.param_groups[0]["weight_decay"] = 0.0
    with recorded_warnings() as caught:
        if between == "flush":
            cell.flush()
        elif between == "save":
            save_checkpoint(tmp_path / "run.safetensors", network, cell)
        assert [moved(), moved()] == [False, False]
    assert ["so the cell is compiled again" in str(each.message) for each in caught] == [True] * (mode == "graph")


def test_a_cell_is_not_cast():
    """But its network is: see below."""
    _, cell = make_cell()
    message = r'^a TrainOneStepCell .* call network = auto_mixed_precision\(network, "O2"\) before you build the cell'
    for call in (lambda: amp.auto_mixed_precision(cell, "O2"), lambda: amp.auto_mixed_precision(cell, "O3"),
                 lambda: cell.to_float(ms.float16),
                 lambda: Model(cell, optimizer=cell.optimizer, amp_level="O2", loss_scale_manager=None)):
        with pytest.raises(ValueError, match=message):
            call()


class Defaults(nn.Cell):
    """A loss whose construct takes one to two arguments; or, as `AnyNumber`, any number."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x, y=None):
        return self.network(x).mean()


class AnyNumber(Defaults):
    def construct(self, *batch):
        return self.network(batch[0]).mean()


@pytest.mark.parametrize("mode", [pytest.param("graph", marks=pytest.mark.slow), "pynative"])
def test_a_network_with_defaults_takes_fewer_arguments(mode, mode_named):
    mode_named(mode)
    x, y = tensors(*batches([4])[0])
    for kind, counts in ((Defaults, (1, 2)), (AnyNumber, (1, 2, 3))):
        network = MLP()
        cell = TrainOneStepCell(kind(network), sgd(network), 9)
        for count in counts:
            cell(*(x, y, y)[:count])
        assert int(cell.accumulator.mini_step) == len(counts)
    cell = TrainOneStepCell(Defaults(network), sgd(network), 9)
    with pytest.raises(TypeError, match=r"Defaults does not take .*got 3 arguments, expected at most 2 \(x, y\)"):
        cell(x, y, y)


@pytest.mark.parametrize("level", [pytest.param("O0", marks=pytest.mark.slow), "O2"])
def test_mixed_precision_is_the_networks(level, mode_named):
    """Losses in 16 bits; parameters and buffers stay as they are. Control: without it, the loss is not in 16 bits."""
    mode_named("graph")
    network = MLP()
    cell = TrainOneStepCell(nn.WithLossCell(amp.auto_mixed_precision(network, level), nn.CrossEntropyLoss()),
                            sgd(network), 2)
    before = values(network.trainable_params())
    for x, y in batches([4, 4]):
        loss = float(cell(*tensors(x, y)))
    buffers = cell.accumulator.window.buffers
    assert {p.dtype for p in (*network.trainable_params(), *buffers)} == {ms.float32}
    assert difference(values(network.trainable_params()), before) > 0
    logits = network(tensors(x, y)[0]).asnumpy()
    assert (logits == logits.astype("float16")).all() == (level == "O2")
    assert loss > 0


@pytest.mark.parametrize(("mode", "build", "warns"), [
    ("pynative", mint.optim.SGD, True), ("pynative", mint.optim.Adam, True), ("pynative", nn.SGD, False),
    pytest.param("graph", mint.optim.SGD, False, marks=pytest.mark.slow)])
def test_an_optimizer_that_changes_nothing_op_by_op_is_warned_of(mode, build, warns):
    """When the parameters move, MindSpore has changed: then remove `warn_if_idle`."""
    network = MLP()
    before = [value.copy() for value in values(network.trainable_params())]
    with running(mode):
        cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), build(network.trainable_params(), 0.1), 1)
        with recorded_warnings() as caught:
            cell(*tensors(*batches([6])[0]))
    said = [str(one.message) for one in caught if "changes no parameter op by op" in str(one.message)]
    assert len(said) == warns
    assert (difference(before, values(network.trainable_params())) == 0) == warns

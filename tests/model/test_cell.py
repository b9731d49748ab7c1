"""TrainOneStepCell: its updates are those of plain MindSpore, by calls and in the graph of another Cell."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.train import CheckpointConfig, LambdaCallback, Model, ModelCheckpoint, amp
from support.model_runs import SIZES, TwoCells, dataset, make_cell, momentum, train
from support.modes import compiled_graphs
from support.training import LOSS, sgd

from ms_accum import FlushCallback, TrainOneStepCell
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.modes import running
from ms_accum.selftest.networks import MLP, batches, tensors

DATA = batches(SIZES)


def plainly_trained(windows, epochs=1):
    """The parameters after plain MindSpore has trained on the undivided windows."""
    network, begin = MLP(), 0
    cell = nn.TrainOneStepCell(nn.WithLossCell(network, LOSS), momentum(network.trainable_params())).set_train()
    for _ in range(epochs):
        for length in windows:
            cell(*tensors(*map(np.concatenate, zip(*DATA[begin:begin + length]))))
            begin = (begin + length) % len(DATA)
    return values(network.trainable_params())


class Weighted(nn.Cell):
    """A loss cell that returns a sum, a mean with its weight, or both."""

    def __init__(self, network, kind):
        super().__init__(auto_prefix=False)
        self.network, self.kind = network, kind
        self.loss_fn = nn.CrossEntropyLoss(reduction="sum" if "sum" in kind else "mean")

    def construct(self, x, y):
        loss = self.loss_fn(self.network(x), y)
        return (loss, y.shape[0]) if "weight" in self.kind else loss


@pytest.mark.parametrize(("mode", "kind"), [
    ("graph", "mean"), ("pynative", "mean"), ("pynative", "sum"), ("pynative", "mean, weight"),
    ("pynative", "sum, weight"), ("pynative", "scaler")])
def test_two_epochs_of_model_equal_plain_training_on_undivided_windows(mode, kind):
    """Controls: windows of one; other windows."""
    options = {"has_weight": "weight" in kind, "loss_reduction": "sum" if "sum" in kind else "mean"}
    if kind == "scaler":
        options["loss_scaler"] = ms.amp.DynamicLossScaler(8.0, 2, 1)
    with running(mode):
        found = []
        for length in (2, 1):
            network = MLP()
            cell = TrainOneStepCell(Weighted(network, kind), momentum(network.trainable_params()), length, **options)
            train(cell, FlushCallback(), epochs=2)
            found.append(values(network.trainable_params()))
            assert (cell.status().epochs, cell.status().trained, cell.status().seen) == (2, 0, 52)
        expected = plainly_trained([2, 2, 1], 2)
    assert difference(found[0], expected) < 1e-6 < 1e-3 < difference(found[1], expected)


@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_two_cells_in_another_cell_train_as_each_does_alone(mode):
    """With windows of two, and of three that may be dropped. In graph mode, windows are closed on the device: then a
    flush and a call from the host go on with what is open. Control: each differs from the other.
    """
    with running(mode):
        both = TwoCells(make_cell(2)[1], make_cell(3, on_nonfinite="skip_window")[1])
        cells, names = (both.one, both.other), [p.name for p in both.get_parameters()]
        assert len(set(names)) == len(names)
        changing = LambdaCallback(on_train_epoch_end=lambda _: [  # as a load does
            setattr(cell.boundary.window, "unit", 7.0) for cell in cells])
        train(both, FlushCallback(), changing, epochs=2)
        trained = [values(cell.optimizer.parameters) for cell in cells]
        batch = tensors(*DATA[0])
        both(*batch)
        for cell in cells:
            cell(*batch)
        assert [cell.status()[:2] for cell in cells] == [(7, 0), (4, 2)]
    alone = []
    with running("pynative"):
        for steps in (2, 3):
            network, cell = make_cell(steps)
            train(cell, FlushCallback(), epochs=2)
            alone.append(values(network.trainable_params()))
    assert [difference(found, expected) <= 1e-6 for found in trained for expected in alone] == [
        True, False, False, True]


class One(nn.Cell):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def construct(self, x, y):
        return self.cell(x, y)


@pytest.mark.parametrize("length", [1, 2])
def test_in_a_graph_a_cell_returns_what_a_call_returns(length):
    """With a loss scaler: the loss, whether a window was dropped, the scale. Windows of one without one: the loss."""
    found = []
    for mode in ("graph", "pynative"):
        with running(mode):
            options = {} if length == 1 else {"loss_scaler": ms.amp.DynamicLossScaler(8.0, 2, 1)}
            cell = make_cell(length, clip_norm=None, **options)[1]
            outer, bad = One(cell), np.array([1, np.inf if length > 1 else 1, 1, 1, 1])
            results = [np.atleast_1d(outer(*tensors(x * factor, y))) for factor, (x, y) in zip(bad, DATA)]
            found.append([*([float(value) for value in row] for row in results), cell.status()[:6]])
    np.testing.assert_allclose(np.concatenate(found[0]), np.concatenate(found[1]), rtol=1e-5)
    if length > 1:
        assert [row[1:] for row in found[1][:-1]] == [[0, 8], [1, 8], [0, 4], [0, 4], [0, 8]]


def test_a_cell_follows_the_mode_of_the_context(mode_named):
    """In the middle of a window, too, as a debugger may change it. Control: other data."""
    def run(modes, seed=2):
        mode_named({"g": "graph", "p": "pynative"}[modes[0]])
        network = MLP()
        cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), sgd(network), 3)
        for mode, (x, y) in zip(modes[1:], batches([6] * 6, seed=seed)):
            mode_named({"g": "graph", "p": "pynative"}[mode])
            cell(*tensors(x, y))
        return values(network.trainable_params()), cell.update_step

    found, updates = run("ggppggg")
    assert updates == 2
    assert difference(found, run("ppppppp")[0]) < 1e-6 < 1e-4 < difference(found, run("ppppppp", 3)[0])


def test_a_model_checkpoint_holds_the_network_and_the_optimizer():
    """By names that do not depend on what the process has built before. The open window and counters are not in it."""
    with running("pynative"):
        (network, cell), (fresh_network, fresh) = make_cell(), make_cell()
        train(cell, ModelCheckpoint("run", ".", CheckpointConfig(save_checkpoint_steps=5)))
        assert ms.load_param_into_net(fresh, ms.load_checkpoint("run-1_5.ckpt")) == ([], [])
    assert len(list(cell.get_parameters())) == len({*network.get_parameters(), *cell.optimizer.get_parameters()})
    assert difference(values(fresh_network.trainable_params()), values(network.trainable_params())) == 0
    assert (cell.status()[:2], fresh.status()[:2]) == ((2, 1), (0, 0))


def samples_of(label):
    return len(label)


@pytest.mark.parametrize("mode", [pytest.param("graph", marks=pytest.mark.slow), "pynative"])
def test_what_does_not_fit_is_an_error_before_anything_is_compiled(mode, mode_named):
    """A Model with a loss_fn has a graph of its own. The window stays as it is. Control: the cell then trains."""
    mode_named(mode)
    network, cell = make_cell()
    optimizer, x, y = cell.optimizer, *tensors(*batches([4])[0])
    bare = TrainOneStepCell(network, optimizer, 2)
    too_few = r"^the network WithLossCell does not take .*got 1 argument, expected 2 \(data, label\); leave loss_fn out"
    too_many = r"^the network MLP does not take .*got 2 arguments, expected 1 \(x\); .*give TrainOneStepCell\(nn\.With"
    cast = r'^a TrainOneStepCell .* call network = auto_mixed_precision\(network, "O2"\) before you build the cell'
    for error, message, call in (
            (TypeError, too_few, lambda: cell(x)), (TypeError, too_many, lambda: bare(x, y)),
            (TypeError, too_many, lambda: train(bare)),
            (TypeError, r"got keyword arguments \(label\), expected arguments by p",
             lambda: cell(x, label=y)),
            (TypeError, r"network is of type function, expected a Cell that returns the loss; .*make_train_step",
             lambda: TrainOneStepCell(lambda x: x, optimizer, 2)),
            (TypeError, "weight_fn is of type int, expected a function",
             lambda: TrainOneStepCell(cell.network, optimizer, 2, weight_fn=3)),
            (TypeError, r"unexpected argument max_grad_norm; did you mean clip_norm",
             lambda: TrainOneStepCell(cell.network, optimizer, 2, max_grad_norm=1.0)),
            (TypeError, r"^weight_fn\(label\) does not take the batch \(2 by position\): too many positional",
             lambda: TrainOneStepCell(cell.network, optimizer, 2, weight_fn=samples_of)(x, y)),
            (ValueError, r"optimizer updates a Parameter called .*, but the network has a different Parameter",
             lambda: TrainOneStepCell(nn.WithLossCell(MLP(), LOSS), optimizer, 2)),
            (ValueError, r"give Model\(TrainOneStepCell\(\.\.\.\)\) without an optimizer",
             lambda: Model(cell, optimizer=optimizer)),
            (ValueError, cast, lambda: amp.auto_mixed_precision(cell, "O2")),
            (ValueError, cast, lambda: Model(cell, optimizer=optimizer, amp_level="O2", loss_scale_manager=None)),
            (AttributeError, "accumulate_step of TrainOneStepCell was assigned",
             lambda: setattr(cell, "accumulate_step", 3))):
        graphs = compiled_graphs()
        with pytest.raises(error, match=message):
            call()
        assert compiled_graphs() == graphs
        assert cell.status().mini_step == bare.status().mini_step == 0
    with pytest.raises(TypeError, match=too_few):
        Model(cell, LOSS).train(1, dataset(), dataset_sink_mode=False)
    train(cell)
    assert cell.update_step == 2


def test_several_ranks_do_not_close_windows_in_a_graph(monkeypatch):
    """Because they meet on the host before. Control: one device, above."""
    both = TwoCells(make_cell()[1], make_cell()[1])
    monkeypatch.setattr(both.one.boundary.window.exchange, "ranks", 2)
    with running("graph"), pytest.raises(ValueError, match="in data sink mode or another Cell's graph, but ranks meet"):
        both(*tensors(*DATA[0]))


def test_declared_shapes_are_those_of_the_network():
    """One graph takes all numbers of samples. Control: without a declaration, each has its own."""
    counts = []
    with running("graph"):
        for declares in (True, False):
            network, cell = make_cell(accumulate_step=9)
            if declares:
                cell.set_inputs(Tensor(shape=(None, 6), dtype=ms.float32), Tensor(shape=(None,), dtype=ms.int32))
            before, data = compiled_graphs(), [tensors(x, y) for x, y in batches([6, 4])]
            losses = [float(cell(*batch)) for batch in data]
            counts.append(compiled_graphs() - before)
            assert losses == pytest.approx([float(LOSS(network(x), y)) for x, y in data], rel=1e-5)
    assert counts == [1, 2]

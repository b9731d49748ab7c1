"""What of a batch is cut, how the aux of the pieces becomes the batch's, and errors between two pieces."""
import re
import sys
from functools import partial
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.modes import running
from support.processes import MEMORY, run_python
from support.training import LOSS, counting, gradient_of

from ms_accum import TrainOneStepCell, make_grad_cache_step, make_train_step, save_checkpoint
from ms_accum.selftest.comparing import difference
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors
from ms_accum.steps.batch import layout
from ms_accum.steps.errors import ask_about_piece

pytestmark = pytest.mark.core


@pytest.mark.usefixtures("compiled_if_slow")
def test_tensors_with_one_row_per_sample_are_cut_and_all_else_passes_through():
    """The batch of 7 is 3 + 3 + 1 rows. Aux: rows in order, in their dtypes, and scalars as means over the batch.

    The rows are a view of a view, of which MindSpore 2.10 read others in a graph.
    """
    network, (x, y) = MLP(), batches([7])[0]
    view = Tensor(np.concatenate((x, x[::-1])).T.copy(), ms.float32).T[:7]
    class_weights = Tensor([1.0, 2.0, 0.5], ms.float32)  # 3 rows: no batch
    temperature = Tensor(2.0)                            # no axes

    def forward_fn(x, y, class_weights, temperature, scale, use_scale):
        logits = network(x) / temperature
        if use_scale:
            logits = logits * scale
        loss = (ops.log_softmax(logits, 1) * ops.one_hot(y, 3) * class_weights).sum() / -len(x)
        return loss, (logits, loss * 0 + len(x), y, logits.argmax(1) == y)

    x, y, *others = *tensors(x, y), class_weights, temperature, 1.5, True
    with running("pynative"):
        whole, (loss, aux) = gradient_of(forward_fn, network, (x, y, *others), has_aux=True)
    cut, (cut_loss, cut_aux) = gradient_of(forward_fn, network, (view, y, *others), has_aux=True, pieces=3)
    assert difference(cut, whole) <= 1e-6
    assert float(cut_loss) == pytest.approx(float(loss), rel=1e-6)
    assert (float(aux[1]), float(cut_aux[1])) == (7.0, pytest.approx((3 * 3 + 3 * 3 + 1) / 7))  # they are pieces
    for i in (0, 2, 3):
        assert cut_aux[i].dtype == aux[i].dtype
        np.testing.assert_allclose(cut_aux[i].asnumpy(), aux[i].asnumpy(), rtol=1e-6)


# --- refusals ---------------------------------------------------------------------------------------------------------

ROWS = Tensor(np.zeros((4, 6)), ms.float32)


@pytest.mark.parametrize(("error", "message", "batch"), [
    *[(ValueError, r"expected at least one Tensor with axes; axis 0 of the first one is the batch", batch)
      for batch in ((), (None,), (3, "x"), (Tensor(1.0),))],
    *[(TypeError, "the batch holds a tuple, list or dict, expected Tensors .* as an argument of its own",
       (ROWS, nested)) for nested in ((Tensor(1.0),), [Tensor(1.0)], {"x": Tensor(1.0)})],
])
def test_a_batch_that_cannot_be_cut_is_refused_and_changes_no_bit(error, message, batch):
    def encode(x):
        return x

    assert layout((3, ROWS, ROWS[0], ROWS)) == (4, (None, 0, None, 0))
    assert layout((3, ROWS, ROWS[0], ROWS[:, 0]), 1) == (6, (None, 1, 0, None))
    for make in (*(partial(make_train_step, LOSS, pieces=pieces) for pieces in (1, 3)),
                 partial(make_grad_cache_step, encode, LOSS, pieces=2)):
        network = MLP()
        optimizer = counting(network)
        step = make(optimizer=optimizer, accumulate_step=3)
        state = [*step.accumulator.parameters, *optimizer.get_parameters()]
        before = [p.asnumpy().tobytes() for p in state]
        with pytest.raises(error, match=message):
            step(*batch)
        assert [p.asnumpy().tobytes() for p in state] == before


# --- errors between two pieces ----------------------------------------------------------------------------------------

X, Y = batches([16])[0]
BAD = np.where(np.arange(16) == 6, 9, Y)  # a label that is out of range raises


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("pieces", [1, 8, None])
def test_a_window_with_a_part_of_a_batch_or_update_is_refused_until_it_is_reset(pieces):
    """An error in a batch that is not cut adds nothing, and the next call goes on. Of a step, and of a cell (None)."""
    network = MLP()
    if pieces:
        driver = make_train_step(mean_loss(network), counting(network), 4, pieces=pieces)
    else:
        driver = TrainOneStepCell(nn.WithLossCell(network, LOSS), counting(network), 4)
    acc = driver.accumulator
    doors = [lambda: driver(*tensors(X, Y)), driver.flush, lambda: save_checkpoint("torn.safetensors", network, driver)]
    driver(*tensors(X, Y))
    if pieces:
        with pytest.raises(RuntimeError, match="must be in"):
            driver(*tensors(X, BAD))
        assert float(acc.weight_sum) == (16 if pieces == 1 else 22)
    torn = [r"may hold only some pieces of a batch.* call reset\(\)"] * (pieces == 8)
    for message in (*torn, r"stopped an update, .*load a checkpoint, on all ranks, or, on one device, call reset"):
        if message not in torn:
            acc.window.mark_emptying()
            acc.boundary.forget()  # as an interrupt leaves it
        for refused in doors:
            with pytest.raises(RuntimeError, match=message):
                refused()
        driver.reset()
        for _ in range(3):
            driver(*tensors(X, Y))
        assert (int(acc.mini_step), float(acc.weight_sum)) == (3, 48)
    driver.reset()
    assert not Path("torn.safetensors").exists()


QUESTION = (r"\nforward_fn failed on piece {} of 4{}; if it runs on the whole batch, does it use row numbers or the "
            r"batch's length\?$")


@pytest.mark.parametrize(("mode", "piece", "error"), [
    ("pynative", 2, RuntimeError), pytest.param("jit", 1, ValueError, marks=pytest.mark.slow)])
def test_an_error_names_the_piece_and_asks_for_row_numbers(mode, piece, error):
    """A loss that picks rows by their place in the batch, and one built for 16 rows. Control: with pieces=1."""
    network, labels = MLP(), Tensor(Y, ms.int32)
    batch = tensors(X, Y)[0], Tensor(np.arange(16), ms.int32)

    def picking(x, places):
        losses = ops.cross_entropy(network(x), labels[:len(x)], reduction="none")
        return ops.gather_elements(losses, 0, places).mean()

    def built(x, places):
        return ops.cross_entropy(network(x), labels)

    forward_fn = picking if error is RuntimeError else built
    with running(mode):
        with pytest.raises(error, match=QUESTION.format(piece, "")):
            make_train_step(forward_fn, counting(network), 1, pieces=4)(*batch)
        assert np.isfinite(float(make_train_step(forward_fn, counting(network), 1)(*batch)))


@pytest.mark.parametrize(("raised", "waits", "question"), [
    (RuntimeError("out of range", 3), "0", QUESTION.format(2, " or before it")),  # of a kernel, reported late
    (RuntimeError("out of range", 3), "1", QUESTION.format(2, "")), (TypeError("dim", 3), "0", QUESTION.format(2, "")),
    *[(RuntimeError(said), "0", None)  # refusals and failed exchanges
      for said in ("forward_fn returned a loss of shape (3,)", "weight is -1", "Launch kernel failed, AllReduce")],
])
def test_a_kernels_error_may_be_of_a_piece_before_and_a_refusal_asks_nothing(raised, waits, question, monkeypatch):
    monkeypatch.setenv("MS_DEV_HOST_BLOCKING_RUN", waits)
    before = raised.args
    ask_about_piece(raised, 1, 4)
    assert raised.args[1:] == before[1:]
    assert re.search(question, raised.args[0]) if question else raised.args == before


LATE = """
import mindspore as ms, numpy as np
from mindspore import Tensor, nn
from ms_accum import make_train_step
network = nn.SequentialCell(nn.Embedding(4, 3), nn.Flatten(), nn.Dense(3, 1))
def forward_fn(ids):
    return network(ids).mean()
train_step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), 0.1), accumulate_step=2, pieces=2)
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
print(len([float(train_step(batch)) for batch in (good, short)]), int(train_step.accumulator.update_step))
"""


@pytest.mark.slow
def test_a_torn_window_is_never_applied_if_mindspore_reports_the_error_late(monkeypatch):
    """As it does in its default environment."""
    monkeypatch.delenv("MS_DEV_HOST_BLOCKING_RUN", raising=False)
    assert run_python(LATE).splitlines() == ["0", "the open window may hold only some pieces of a batch, becaus", "2 1"]


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory_is_flat_in_the_batch():
    """From 32 samples to 512 in pieces of 16, in processes of their own, with the compiler's memory on both sides."""
    def grown(kind):
        small, large = (int(run_python(MEMORY, kind, samples)) for samples in ("32", "512"))
        return large - small

    undivided = grown("undivided")
    assert undivided > 120_000  # KiB
    assert grown("cached") <= 0.2 * undivided
    assert grown("cut") <= 0.15 * undivided

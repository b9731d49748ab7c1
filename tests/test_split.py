"""What of a batch is cut, in which rows, and how the aux of the pieces becomes the batch's; through the drivers, which do nothing else."""
from functools import partial

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, difference, tensors, values
from following import LOSS, counting, gradient_of, make_driver, op_by_op, run_as
from mindspore import Tensor, nn, ops

from ms_accum import Accumulator, TrainOneStepCell, make_grad_cache_step, make_train_step


@pytest.mark.parametrize("mode", ["jit", "pynative"])
def test_tensors_with_one_row_per_sample_are_cut_and_all_else_passes_through(mode):
    """The aux, of which a piece's length is a scalar and so averaged, shows that pieces really are pieces."""
    network, (x, y) = MLP(), batches([6])[0]
    class_weights = Tensor([1.0, 2.0, 0.5], ms.float32)  # 3 rows: no batch
    temperature = Tensor(2.0)                            # no axes

    def forward_fn(x, y, class_weights, temperature, scale, use_scale):
        logits = network(x) / temperature
        if use_scale:
            logits = logits * scale
        loss = (ops.log_softmax(logits, 1) * ops.one_hot(y, 3) * class_weights).sum() / -len(x)
        return loss, loss * 0 + len(x)

    batch = (*tensors(x, y), class_weights, temperature, 1.5, True)
    with op_by_op():
        whole, (loss, rows) = gradient_of(forward_fn, network, batch, has_aux=True)
    with run_as(mode):
        cut, (cut_loss, cut_rows) = gradient_of(forward_fn, network, batch, has_aux=True, micro_size=3)
    assert difference(cut, whole) <= 1e-6
    assert float(cut_loss) == pytest.approx(float(loss), rel=1e-6)
    assert (float(rows), float(cut_rows)) == (6.0, 2.0)


@pytest.mark.parametrize("driver", ["fused", "cell"])
def test_views_are_cut_as_what_they_are(mode_named, driver):
    """A loop in a graph reads the wrong rows of them (MindSpore 2.10). One graph for all, and one update for each."""
    x, y = (np.concatenate(part) for part in zip(*batches([8] * 3)))
    network = MLP()
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 1, reduction="mean")
    mode_named("graph" if driver == "cell" else "jit")
    train_step = make_driver(driver, network, acc, micro_size=4)
    plain, transposed = Tensor(x, ms.float32), Tensor(np.ascontiguousarray(x.T), ms.float32).T
    views = (plain[:8], Tensor(np.ascontiguousarray(x[8:16].T), ms.float32).T, transposed[16:])
    weights = values(network.trainable_params())
    for i, view in enumerate(views):
        rows = slice(8 * i, 8 * i + 8)
        train_step(view, Tensor(y, ms.int32)[rows])
        gradients = reference.loss_and_gradients(weights, x[rows], y[rows])[1]
        weights = [w - 0.1 * g for w, g in zip(weights, gradients)]
        assert difference(values(network.trainable_params()), weights) < 1e-6
    mode_named("jit")


# --- refusals ------------------------------------------------------------------------------------------------------------

ROWS = Tensor(np.zeros((4, 6)), ms.float32)


@pytest.mark.parametrize(("error", "message", "batch", "named"), [
    *[(ValueError, r"expected at least one Tensor with axes and one row", batch, {})
      for batch in ((), (None,), (3, "x"), (Tensor(1.0),), (Tensor(np.zeros((0, 6)), ms.float32),))],
    *[(TypeError, rf"the batch holds a {type(nested).__name__}, expected Tensors .* as an argument of its own",
       (*first, nested), {}) for nested in ((Tensor(1.0),), [Tensor(1.0)], {"x": Tensor(1.0)}) for first in ((), (ROWS,))],
    (TypeError, r"the batch holds a NumPy array of shape \(4,\), expected Tensors; wrap it", (ROWS, np.zeros(4)), {}),
    (TypeError, r"_fn\(.+\) does not take the batch \(.*data.*\): .*; give it parameters for the batch",
     (), {"data": ROWS, "label": ROWS}),
    (TypeError, r"_fn\(.+\) does not take the batch \(1 by position, no_such\): ", (ROWS,), {"no_such": ROWS}),
])
def test_a_batch_that_cannot_be_cut_is_refused_and_changes_no_bit(error, message, batch, named):
    def encode(x):
        return x

    steps = [partial(make_train_step, LOSS, strategy=strategy, micro_size=size)
             for strategy in ("fused", "split") for size in (1, 3)]
    for make in (*steps, partial(make_grad_cache_step, encode, LOSS, micro_size=2)):
        acc = counting(MLP(), 3)
        acc.add(acc.optimizer.parameters)
        before = [p.asnumpy().tobytes() for p in (*acc.parameters, *acc.optimizer.get_parameters())]
        with pytest.raises(error, match=message):
            make(accumulator=acc)(*batch, **named)
        assert [p.asnumpy().tobytes() for p in (*acc.parameters, *acc.optimizer.get_parameters())] == before


def test_a_cell_refuses_containers_and_dynamic_shapes(mode_named):
    network, (x, y) = MLP(), tensors(*batches([4])[0])
    with pytest.raises(TypeError, match="the batch holds a tuple, expected Tensors"):
        TrainOneStepCell(nn.WithLossCell(network, LOSS), counting(network))((x, y))
    mode_named("graph")
    for micro_size in (1, 2):
        cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), counting(network), micro_size=micro_size)
        cell.set_inputs(Tensor(shape=[None, 6], dtype=ms.float32), Tensor(shape=[None], dtype=ms.int32))
        with pytest.raises(ValueError, match=r"dynamic shape \(None, 6\).*leave set_inputs out"):
            cell(x, y)

"""Batches as people have them: by position, by name, dicts, NumPy, datasets; names are matched, and compiled once."""
from collections import UserDict
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from mindspore.dataset import zip as dataset_zip
from support.modes import compiled_graphs, running
from support.training import gradient_of

from ms_accum import make_train_step
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, batches, tensors
from ms_accum.steps.batch import layout
from ms_accum.steps.pieces import joined

RNG = np.random.default_rng(0)
ROWS = [{"input_ids": RNG.normal(size=(6, 6)).astype(np.float32), "labels": RNG.integers(0, 3, 6).astype(np.int32),
         "mask": np.array(mask, np.float32)} for mask in ([1, 1, 1, 1, 1, 0], [1, 0, 1, 0, 1, 0], [1, 0, 1, 1, 1, 1])]
FIRST = {name: Tensor(value) for name, value in ROWS[0].items()}


def network():
    ms.set_seed(1)
    return nn.SequentialCell(nn.Dense(6, 5, weight_init="normal"), nn.Tanh(), nn.Dense(5, 3, weight_init="normal"))


def masked_mean(net):
    def forward_fn(input_ids, labels, mask=None):
        losses = ops.cross_entropy(net(input_ids), labels, reduction="none")
        return losses.mean() if mask is None else (losses * mask).sum() / mask.sum()

    return forward_fn


def step_of(weight_fn=None, wrap=lambda f: f, loss_of=masked_mean, **options):
    net = network()
    return make_train_step(wrap(loss_of(net)), nn.SGD(net.trainable_params(), 0.5), 2, weight_fn=weight_fn, **options)


def of_mask(mask):
    return mask.sum()


def tokens(input_ids, labels, mask):
    return mask.sum()


def scaled_tokens(factor, input_ids, labels, mask):
    return mask.sum() * factor


def with_keywords(function):
    def forward_fn(**batch):
        return function(**batch)

    return forward_fn


def by_name(step):
    yield from (step(**{name: Tensor(value) for name, value in row.items()}) for row in ROWS)
    step.flush()


def one_by_position(step):
    yield from (step(Tensor(row["input_ids"]), labels=Tensor(row["labels"]), mask=Tensor(row["mask"])) for row in ROWS)
    step.flush()


def positions(step):
    return step.epoch([tuple(row.values()) for row in ROWS])


def dataset():
    return GeneratorDataset([tuple(row.values()) for row in ROWS], list(ROWS[0]), shuffle=False)


def trained(feed, *functions, **options):
    """The parameters and losses after three microbatches, in windows of 2."""
    step = step_of(*functions, **options)
    losses = [float(loss) for loss in feed(step)]
    assert step.status()[:2] == (2, 0)
    return [*values(step.optimizer.parameters), np.array(losses)]


@pytest.mark.parametrize(("mode", "pieces", "forms"), [
    pytest.param("jit", 1, [(by_name, of_mask, with_keywords), (one_by_position, tokens, partial)],
                 marks=pytest.mark.slow),
    ("pynative", 3, [(lambda step: step.epoch(ROWS), of_mask, with_keywords),
                     (lambda step: step.epoch(dataset()), partial(scaled_tokens, 1.0), partial),
                     (lambda step: step.epoch(dataset().create_dict_iterator()), tokens, partial)]),
])
def test_every_form_of_a_batch_trains_alike(mode, pieces, forms):
    """Control: the weights count. MindSpore's cross entropy returns other last bits on other numbers of threads."""
    with running(mode):
        *plain, losses = trained(positions, tokens, pieces=pieces)
        for feed, *functions in forms:
            *others, other_losses = trained(feed, *functions, pieces=pieces)
            assert all(np.array_equal(one, other) for one, other in zip(plain, others))
            np.testing.assert_allclose(other_losses, losses, rtol=2e-7)
    with running("pynative"):
        unweighted = trained(positions, pieces=pieces)
    assert max(abs(a - b).max() for a, b in zip(plain, unweighted)) > 1e-3


def test_each_set_of_names_is_compiled_once():
    step, counts = step_of(wrap=partial), []
    for batch in (FIRST, dict(reversed(FIRST.items())), FIRST, {k: FIRST[k] for k in ("labels", "input_ids")}, FIRST):
        step(**batch)
        step.reset()
        counts.append(compiled_graphs())
    assert counts[0] == counts[1] == counts[2] < counts[3] == counts[4]


@pytest.mark.usefixtures("uncompiled")
def test_names_come_in_the_order_of_the_parameters_and_none_is_left_out():
    """A vector for the classes that stands first in a dict is not the batch."""
    def scaled_mean(net):
        def forward_fn(input_ids, labels, scale, mask=None):
            return ops.cross_entropy(net(input_ids) * scale, labels)

        return forward_fn

    results, scale = [], np.ones(3, np.float32)
    ids, labels = ROWS[2]["input_ids"], ROWS[2]["labels"]
    for batch in ({"labels": labels, "input_ids": ids, "mask": None, "scale": scale},
                  UserDict(scale=scale, input_ids=ids, labels=labels)):
        step = step_of(loss_of=scaled_mean, pieces=2)
        losses = [float(loss) for loss in step.epoch([batch, batch])]
        assert step.status().weight == 12
        results.append([*values(step.optimizer.parameters), np.array(losses)])
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)


# --- what cannot be trained -------------------------------------------------------------------------------------------

SAMPLES = {"input_ids": np.zeros((8, 6), np.float32), "labels": np.zeros(8, np.int32)}


class Batches(GeneratorDataset):
    """A user's own source."""


@pytest.mark.usefixtures("uncompiled")
def test_a_dataset_of_samples_is_an_error_and_batches_are_not():
    """Each row would be a microbatch that counts its features."""
    def samples():
        return NumpySlicesDataset(SAMPLES)

    step = step_of()
    for refused in (samples(), samples().shuffle(8).take(4).repeat(2), samples().create_dict_iterator(),
                    dataset_zip((NumpySlicesDataset({"a": np.zeros(2)}).batch(2), samples()))):
        with pytest.raises(ValueError, match=r"yields samples of NumpySlicesDataset .* give e\.g\. dataset\.batch\(3"):
            next(step.epoch(refused))
    with pytest.raises(TypeError, match=r"for a single one call train_step\(\*\*batch\)"):
        next(step.epoch(SAMPLES))
    for given in (samples().batch(4), samples().batch(4).map(lambda x: x, "labels").take(2),
                    samples().padded_batch(4), samples().batch(4).create_tuple_iterator(),
                    Batches([tuple(SAMPLES.values())] * 2, list(SAMPLES), shuffle=False)):
        assert len(list(step.epoch(given))) == 2


def of_m(m):
    return m.sum()


@pytest.mark.parametrize(("message", "weight_fn", "names"), [
    (r"forward_fn\(input_ids, labels, mask=None\) does not take the batch \(input_ids, labels, idx\): got an "
     r"unexpected keyword argument 'idx'; give it parameters for the batch", None, {"idx": FIRST["labels"]}),
    (r"does not take the batch \(input_ids\): missing a required argument: 'labels'", None, {"labels": ...}),
    (r"weight_fn\(m\) does not take the batch .*missing a required argument: 'm'", of_m, {}),
    (r"labels is None, expected a Tensor: .*; give the parameter this default", None, {"labels": None}),
    (r"mask is 'all', expected a Tensor: .* bind it with functools.partial", None, {"mask": "all"}),
])
def test_a_batch_that_a_function_does_not_take_is_an_error(message, weight_fn, names):
    step = step_of(weight_fn)
    batch = {"input_ids": FIRST["input_ids"], "labels": FIRST["labels"], **names}
    with pytest.raises(TypeError, match=message):
        step(**{name: value for name, value in batch.items() if value is not ...})
    with pytest.raises(TypeError, match=r"does not take the batch \(4 by position\): too many positional"):
        step(*[FIRST["input_ids"]] * 4)
    assert step.status().mini_step == 0


ROWS_OF_4 = Tensor(np.zeros((4, 6)), ms.float32)


def test_which_arguments_are_cut():
    assert layout((3, ROWS_OF_4, ROWS_OF_4[0], ROWS_OF_4)) == (4, (None, 0, None, 0))
    assert layout((3, ROWS_OF_4, ROWS_OF_4[0], ROWS_OF_4[:, 0]), 1) == (6, (None, 1, 0, None))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("error", "message", "batch"), [
    *[(ValueError, f"the batch is {given}, expected at least one .* NumPy array with axes; axis 0 of the first one is "
       "the batch", batch)
      for given, batch in (("empty", ()), ("<class 'NoneType'>", (None,)), ("<class 'int'>, <class 'str'>", (3, "x")),
                           (r"a Tensor of shape \(\)", (Tensor(1.0),)))],
    *[(TypeError, "the batch holds a tuple, list or dict, expected Tensors .* as an argument of its own",
       (ROWS_OF_4, nested)) for nested in ((Tensor(1.0),), [Tensor(1.0)], {"x": Tensor(1.0)})],
])
def test_a_batch_without_samples_and_one_with_tuples_change_nothing(error, message, batch):
    def forward_fn(*batch):
        return batch[0].mean()

    net = network()
    for pieces in (1, 3):
        step = make_train_step(forward_fn, nn.SGD(net.trainable_params(), 0.5), 2, pieces=pieces, network=net)
        with pytest.raises(error, match=message):
            step(*batch)
        assert step.status().trained == 0


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
    of_nothing = joined([(Tensor(0.0), Tensor(np.nan)), (Tensor(2.0), Tensor(3.0))], Tensor(2.0), 0)
    assert float(of_nothing) == 3  # the mean of a piece of weight 0 is ignored

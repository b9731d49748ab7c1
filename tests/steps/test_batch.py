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

from ms_accum import check_equivalence, make_train_step
from ms_accum.selftest.comparing import values

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
    assert (int(step.accumulator.update_step), int(step.accumulator.mini_step)) == (2, 0)
    return [*values(step.accumulator.optimizer.parameters), np.array(losses)]


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
        step.accumulator.reset()
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
        assert float(step.accumulator.window_weight) == 12
        net = network()
        assert check_equivalence(scaled_mean(net), net, batch, 2).samples == 6
        results.append([*values(step.accumulator.optimizer.parameters), np.array(losses)])
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)


# --- refusals ---------------------------------------------------------------------------------------------------------

SAMPLES = {"input_ids": np.zeros((8, 6), np.float32), "labels": np.zeros(8, np.int32)}


class Batches(GeneratorDataset):
    """A user's own source."""


@pytest.mark.usefixtures("uncompiled")
def test_a_dataset_of_samples_is_refused_and_batches_are_not():
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
    for batches in (samples().batch(4), samples().batch(4).map(lambda x: x, "labels").take(2),
                    samples().padded_batch(4), samples().batch(4).create_tuple_iterator(),
                    Batches([tuple(SAMPLES.values())] * 2, list(SAMPLES), shuffle=False)):
        assert len(list(step.epoch(batches))) == 2


def of_m(m):
    return m.sum()


@pytest.mark.parametrize(("message", "weight_fn", "names"), [
    (r"forward_fn\(input_ids, labels, mask=None\) does not take the batch \(input_ids, labels, idx\): got an "
     r"unexpected argument 'idx'; give it parameters for the batch", None, {"idx": FIRST["labels"]}),
    (r"does not take the batch \(input_ids\): missing a required argument: 'labels'", None, {"labels": ...}),
    (r"weight_fn\(m\) does not take the batch .*missing a required argument: 'm'", of_m, {}),
    (r"labels is None, expected a Tensor: .*; give the parameter labels the def", None, {"labels": None}),
    (r"mask is a str, expected a Tensor: .* bind it with functools.partial", None, {"mask": "all"}),
])
def test_a_batch_that_a_function_does_not_take_is_refused(message, weight_fn, names):
    step = step_of(weight_fn)
    batch = {"input_ids": FIRST["input_ids"], "labels": FIRST["labels"], **names}
    with pytest.raises(TypeError, match=message):
        step(**{name: value for name, value in batch.items() if value is not ...})
    with pytest.raises(TypeError, match=r"does not take the batch \(4 by position\): too many positional"):
        step(*[FIRST["input_ids"]] * 4)
    assert int(step.accumulator.mini_step) == 0

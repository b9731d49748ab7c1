"""Batches as people have them: one call builds the step, epochs flush, and names are matched, compiled once for each set of names."""
from collections import UserDict
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from conftest import MLP, compiled_graphs, values
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset

from ms_accum import Accumulator, TrainOneStepCell, check_equivalence, make_grad_cache_step, make_train_step

RNG = np.random.default_rng(0)
ROWS = [{"input_ids": RNG.normal(size=(len(mask), 6)).astype(np.float32), "labels": RNG.integers(0, 3, len(mask)).astype(np.int32),
         "mask": np.array(mask, np.float32)} for mask in ([1, 1, 1, 1, 1, 0], [1, 0, 1, 0, 1, 0], [1, 0, 1, 1, 1, 1])]


def network():
    ms.set_seed(1)
    return nn.SequentialCell(nn.Dense(6, 5, weight_init="normal"), nn.Tanh(), nn.Dense(5, 3, weight_init="normal"))


def masked_mean(net):
    def forward_fn(input_ids, labels, mask=None):
        losses = ops.cross_entropy(net(input_ids), labels, reduction="none")
        return losses.mean() if mask is None else (losses * mask).sum() / mask.sum()

    return forward_fn


def unmasked(mask):
    return mask.sum()


def trained(feed, micro_size=1, strategy="fused", weight_fn=unmasked, wrap=lambda f: f, **options):
    """The parameters and losses after two epochs of three microbatches, in windows of 2."""
    net = network()
    step = make_train_step(wrap(masked_mean(net)), nn.SGD(net.trainable_params(), 0.5), accumulate_step=2, micro_size=micro_size,
                           weight_fn=weight_fn, strategy=strategy, **options)
    losses = [float(loss) for _ in range(2) for loss in feed(step)]
    assert (int(step.accumulator.update_step), int(step.accumulator.mini_step)) == (4, 0)
    return [*values(net.trainable_params()), np.array(losses)]


def positions(step):
    yield from step.epoch([tuple(row.values()) for row in ROWS])


def names(step):
    for row in ROWS:
        yield step(**{name: Tensor(value) for name, value in row.items()})
    step.flush()


FEEDS = {
    "names": names,
    "dicts": lambda step: step.epoch(ROWS),
    "one by position": lambda step: (loss for row in ROWS for loss in step_and_flush(step, row)),
    "iterator of dicts": lambda step: step.epoch(dataset().create_dict_iterator()),
    "dataset": lambda step: step.epoch(dataset()),
}


def step_and_flush(step, row):
    yield step(Tensor(row["input_ids"]), labels=Tensor(row["labels"]), mask=Tensor(row["mask"]))
    if row is ROWS[-1]:
        step.flush()


def dataset():
    return GeneratorDataset([tuple(row.values()) for row in ROWS], list(ROWS[0]), shuffle=False)


def tokens(input_ids, labels, mask):
    return mask.sum()


def with_keywords(function):
    def forward_fn(**batch):
        return function(**batch)

    return forward_fn


@pytest.mark.parametrize(("micro_size", "strategy", "forms"), [
    (1, "fused", {"names": (unmasked, with_keywords), "one by position": (tokens, partial),
                  "iterator of dicts": (unmasked, partial), "dataset": (tokens, partial)}),
    (3, "split", {"dicts": (unmasked, with_keywords)}),
])
def test_every_form_of_a_batch_trains_alike(micro_size, strategy, forms):
    plain = trained(positions, micro_size, strategy, weight_fn=tokens)
    unweighted = trained(positions, micro_size, strategy, weight_fn=None)
    assert max(abs(a - b).max() for a, b in zip(plain, unweighted)) > 1e-3, "the weights count"
    for name, (weight_fn, wrap) in forms.items():
        for one, other in zip(plain, trained(FEEDS[name], micro_size, strategy, weight_fn, wrap)):
            np.testing.assert_array_equal(one, other, err_msg=name)


def test_each_set_of_names_is_compiled_once():
    net = network()
    step = make_train_step(partial(masked_mean(net)), nn.SGD(net.trainable_params(), 0.1), accumulate_step=1)
    row = {name: Tensor(value) for name, value in ROWS[0].items()}
    counts = []
    for batch in (row, dict(reversed(row.items())), row, {k: row[k] for k in ("labels", "input_ids")}, row):
        step(**batch)
        counts.append(compiled_graphs())
    assert counts[0] == counts[1] == counts[2] < counts[3] == counts[4]


def test_a_batch_that_a_function_does_not_take_is_refused():
    net = network()
    row = {name: Tensor(value) for name, value in ROWS[0].items()}
    step = make_train_step(masked_mean(net), nn.SGD(net.trainable_params(), 0.1), accumulate_step=2)
    with pytest.raises(TypeError, match=r"forward_fn\(input_ids, labels, mask=None\) does not take the batch \(input_ids, labels, idx\): "
                                        "got an unexpected argument 'idx'; give it parameters for the batch"):
        step(input_ids=row["input_ids"], labels=row["labels"], idx=row["labels"])
    with pytest.raises(TypeError, match=r"does not take the batch \(input_ids\): missing a required argument: 'labels'"):
        step(input_ids=row["input_ids"])
    with pytest.raises(TypeError, match=r"weight_fn\(m\) does not take the batch .*missing a required argument: 'm'"):
        make_train_step(masked_mean(net), step.accumulator, weight_fn=lambda_of_m)(**row)
    with pytest.raises(TypeError, match=r"weight_fn\(m\) does not take the batch \(2 by position\): too many positional"):
        make_train_step(masked_mean(net), step.accumulator, weight_fn=lambda_of_m)(row["input_ids"], row["labels"])
    with pytest.raises(TypeError, match=r"labels is None, which cannot be passed by name .* give the parameter labels the default"):
        step(input_ids=row["input_ids"], labels=None)
    with pytest.raises(TypeError, match=r"mask is a str, which cannot be passed by name .* bind it with functools.partial"):
        step(input_ids=row["input_ids"], labels=row["labels"], mask="all")
    assert int(step.accumulator.mini_step) == 0
    step(**row)
    assert int(step.accumulator.mini_step) == 1


def lambda_of_m(m):
    return m.sum()


def test_updated_says_whether_the_last_call_closed_a_window():
    x = np.zeros((4, 6), np.float32), np.zeros(4, np.int32)
    for strategy in ("fused", "split"):
        net = network()
        step = make_train_step(masked_mean(net), nn.SGD(net.trainable_params(), 0.1), accumulate_step=2, strategy=strategy)
        assert not step.updated
        seen = [(bool(step.updated), step.updated.dtype, step.updated.shape) for _ in step.epoch([x] * 3)]
        assert seen == [(False, ms.bool_, ()), (True, ms.bool_, ()), (False, ms.bool_, ())]
        assert step.updated, "the end of the epoch applied the incomplete window"
        assert not step.flush()
        assert not step.updated


def test_leaving_an_epoch_early_leaves_the_window_open():
    net = network()
    step = make_train_step(masked_mean(net), nn.SGD(net.trainable_params(), 0.1), accumulate_step=4)
    for _ in step.epoch([tuple(row.values()) for row in ROWS]):
        break
    assert (int(step.accumulator.mini_step), int(step.accumulator.update_step)) == (1, 0)
    assert len(list(step.epoch([tuple(row.values()) for row in ROWS]))) == 3
    assert (int(step.accumulator.mini_step), int(step.accumulator.update_step)) == (0, 1)


def test_one_call_builds_the_accumulator_with_its_options():
    net = network()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    averaged = []

    def hook():
        averaged.append(1)

    step = make_train_step(masked_mean(net), optimizer, accumulate_step={0: 1, 2: 3}, clip_norm=1.0, on_nonfinite="skip_window",
                           buffer_dtype=ms.float32, after_update=hook)
    made = step.accumulator
    assert (made.reduction, made.clip_norm, made.on_nonfinite, made.after_update) == ("mean", 1.0, "skip_window", hook)
    assert made.accumulate_step == {0: 1, 2: 3}
    assert make_train_step(masked_mean(net), made).accumulator is made
    assert make_train_step(masked_mean(net), accumulator=made).accumulator is made
    assert make_train_step(masked_mean(net), optimizer=optimizer, accumulate_step=3).accumulator.optimizer is optimizer
    cell = TrainOneStepCell(nn.WithLossCell(net, nn.CrossEntropyLoss()), nn.SGD(net.trainable_params(), 0.1), 2, clip_norm=2.0)
    assert (cell.accumulator.reduction, cell.accumulator.clip_norm, cell.accumulator.accumulate_step) == ("mean", 2.0, 2)
    assert np.isnan(float(made.grad_norm)), "not measured yet"
    cell(Tensor(ROWS[0]["input_ids"]), Tensor(ROWS[0]["labels"]))
    cell(Tensor(ROWS[0]["input_ids"]), Tensor(ROWS[0]["labels"]))
    assert float(cell.accumulator.grad_norm) > 0


@pytest.mark.parametrize("make", [make_train_step, TrainOneStepCell])
def test_arguments_that_contradict_an_accumulator_are_refused(make):
    net = MLP()
    first = nn.WithLossCell(net, nn.CrossEntropyLoss())
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    ready = Accumulator(optimizer, 2, reduction="mean")
    for arguments, options, error, message in (
            ((ready, 2), {}, ValueError, "got an Accumulator and also accumulate_step, which the Accumulator has already; give an"),
            ((ready,), {"clip_norm": 1.0, "reducer": None}, ValueError, "got an Accumulator and also clip_norm, reducer, which"),
            ((optimizer,), {}, TypeError, "accumulate_step is missing, expected it with an optimizer.*give accumulate_step=4"),
            ((optimizer, 0), {}, ValueError, "accumulate_step is 0, expected an int >= 1"),
            ((optimizer, 2), {"reduction": "sum"}, ValueError, "the accumulator has reduction='sum', expected \"mean\""),
            ((optimizer, 2), {"clip": 1.0}, TypeError, "unexpected keyword argument 'clip'"),
            ((ready,), {"optimizer": optimizer}, ValueError, "got an Accumulator and also optimizer, which"),
            ((), {"optimizer": optimizer}, TypeError, "accumulate_step is missing"),
            ((), {}, TypeError, "accumulator is of type NoneType, expected a MindSpore optimizer"),
            ((3, 2), {}, TypeError, "accumulator is of type int, expected a MindSpore optimizer")):
        with pytest.raises(error, match=message):
            make(first, *arguments, **options)


def test_a_network_that_was_built_again_is_refused_with_the_remedy():
    old, new = network(), network()
    optimizer = nn.SGD(old.trainable_params(), 0.1)
    step = make_train_step(masked_mean(new), optimizer, accumulate_step=2)
    with pytest.raises(ValueError, match=r"different Parameters of the same name.*built again .*, build the optimizer"):
        step(*map(Tensor, list(ROWS[0].values())[:2]))
    with pytest.raises(ValueError, match=r"the optimizer updates another Parameter called 0.weight than the network has.*built again"):
        TrainOneStepCell(nn.WithLossCell(new, nn.CrossEntropyLoss()), optimizer, 2)


def encoder(net):
    def encode(input_ids, labels, mask):
        return net(input_ids)

    return encode


def test_a_contrastive_step_takes_names_and_epochs():
    results = []
    for feed in (lambda step, rows: step.epoch(rows), lambda step, rows: step.epoch([tuple(row.values()) for row in rows])):
        net = network()
        encode = encoder(net)

        def spread(representations):
            return (representations @ representations.T).mean()

        accumulator = Accumulator(nn.SGD(net.trainable_params(), 0.1), 2, reduction="mean")
        step = make_grad_cache_step(encode, spread, accumulator, micro_size=2)
        losses = [float(loss) for loss in feed(step, ROWS)]
        assert int(accumulator.update_step) == 2
        results.append([*values(net.trainable_params()), np.array(losses)])
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)


def test_names_come_in_the_order_of_the_parameters_and_none_is_left_out():
    """A vector for the classes that stands first in a dict is not the batch."""
    results = []
    for batch in ({"labels": ROWS[2]["labels"], "input_ids": ROWS[2]["input_ids"], "mask": None, "scale": np.ones(3, np.float32)},
                  UserDict(scale=np.ones(3, np.float32), input_ids=ROWS[2]["input_ids"], labels=ROWS[2]["labels"])):
        net = network()
        step = make_train_step(scaled_mean(net), nn.SGD(net.trainable_params(), 0.5), accumulate_step=2, micro_size=2)
        losses = [float(loss) for loss in step.epoch([batch, batch])]
        assert float(step.accumulator.window_weight) == 12
        assert check_equivalence(scaled_mean(net), net, batch, 2).samples == 6
        results.append([*values(net.trainable_params()), np.array(losses)])
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)


def scaled_mean(net):
    def forward_fn(input_ids, labels, scale, mask=None):
        return ops.cross_entropy(net(input_ids) * scale, labels)

    return forward_fn


@pytest.mark.parametrize("wrap", [partial, with_keywords])
def test_the_check_takes_names(wrap):
    """And gives the answer, the causes and the numbers that it gives for the same batch by position."""
    net = network()
    batch = dict(ROWS[0], mask=np.array([1, 1, 1, 0, 1, 0], np.float32))
    for weight_fn, exact in ((None, False), (tokens, True)):
        position = check_equivalence(masked_mean(net), net, tuple(map(Tensor, batch.values())), 3, weight_fn=weight_fn)
        named = check_equivalence(wrap(masked_mean(net)), net, batch, 3, weight_fn=weight_fn and unmasked)
        assert named.ok == position.ok == exact
        assert named.per_parameter == position.per_parameter
        assert [cause.what for cause in named.causes] == [cause.what for cause in position.causes]
    with pytest.raises(TypeError, match=r"does not take the batch \(x\): "):
        check_equivalence(masked_mean(net), net, {"x": batch["input_ids"]}, 2)


def test_batches_of_one_tensor_need_no_tuple():
    net = network()

    def forward_fn(x):
        return net(x).mean()

    step = make_train_step(forward_fn, nn.SGD(net.trainable_params(), 0.1), accumulate_step=1)
    (alone,) = step.epoch([ROWS[0]["input_ids"]])
    assert alone.shape == ()

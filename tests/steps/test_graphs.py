"""What the functions of a train step return: what cannot be used is refused and changes nothing; NaN as a weight."""
# ruff: noqa: E731 - a lambda in a statement of its own can be compiled, too
import re
from collections import OrderedDict
from dataclasses import dataclass

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.modes import running
from support.recovering import recover
from support.training import LOSS, sgd

from ms_accum import TrainOneStepCell, make_grad_cache_step, make_train_step
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, batches, tensors

NETWORK = nn.Dense(2, 3)
nothing = lambda x: None
rows = lambda x: NETWORK(x)
vector = lambda x: NETWORK(x).mean(0)
mixed = lambda x: (NETWORK(x), NETWORK(x).astype(ms.float16))
scalar = lambda x: NETWORK(x).mean()
count = lambda x: (NETWORK(x) > 0).sum()
as_number = lambda x: float(NETWORK(x).mean())
as_item = lambda x: NETWORK(x).mean().item()
as_numpy = lambda x: float(NETWORK(x).mean().asnumpy())
three_values = lambda x: (NETWORK(x).mean(), x, x)
loss_and_vector = lambda x: (NETWORK(x).mean(), NETWORK(x).mean(0))
loss_and_number = lambda x: (NETWORK(x).mean(), (NETWORK(x), 3))
loss_and_nothing = lambda x: (NETWORK(x).mean(), ())
minus_one = lambda x: -1.0
ones = lambda x: ops.ones(4)
two_weights = lambda x: (1.0, 2.0)
mean = lambda *z: z[0].mean()
mean_rows = lambda z: z.mean(0)
pair = lambda z: (z.mean(), z)

AUX = r"expected \(loss, aux\) because of has_aux=True; aux may be a tuple"
JOIN = r"return Tensors of shape \(\) or with one row for each sample, or give pieces=1$"
ROWS = "return a Tensor with one row per sample, or a tuple of such Tensors of one float dtype$"
WEIGHT = "give the number of samples or unmasked tokens in the microbatch$"
MEAN = r"expected shape \(\); return the mean over the samples"
CUT = {"has_aux": True, "pieces": 2}
NO_NUMBER = r"expected the loss alone; return the loss itself, without float\(\), \.item\(\) or \.asnumpy\(\)"
A_NUMBER = "a (number|Python object that a graph cannot read|value of type float)"
ACCEPTED = "accepted and changed the window$"


def step(forward_fn, **options):
    return {"forward_fn": forward_fn, **options}


def cached(encode_fn, loss_fn):
    return {"encode_fn": encode_fn, "loss_fn": loss_fn}


# What is given to a door, and the first line of the message.
CASES = [
    (step(scalar, has_aux=True), f"TypeError forward_fn returned a value of type Tensor, {AUX}$"),
    (step(nothing), r"TypeError forward_fn returned None, expected the loss alone; is its `return` missing\?$"),
    (step(as_number), f"TypeError forward_fn returned {A_NUMBER}, {NO_NUMBER}$"),
    (step(as_item), f"TypeError forward_fn returned {A_NUMBER}, {NO_NUMBER}$"),
    (step(as_numpy), f"TypeError forward_fn returned {A_NUMBER}, {NO_NUMBER}"),
    ({"cell": as_numpy}, f"TypeError the network returned {A_NUMBER}, {NO_NUMBER}"),
    (step(three_values, has_aux=True), f"TypeError forward_fn returned 3 values, {AUX}$"),
    (step(three_values), "TypeError forward_fn returned 3 values, expected the loss alone; give has_aux=True if "),
    (step(rows), rf"ValueError forward_fn returned a loss of shape \(4, 3\), {MEAN}; if it computes no loss, give "
                 r"nn\.WithLossCell\(network, loss_fn\)$"),
    (step(count), "TypeError forward_fn returned a loss of Int64, expected a float dtype; do not cast the net"),
    (step(loss_and_vector, **CUT), rf"ValueError .* aux of shape \(3,\) for a piece of 2 samples; {JOIN}"),
    (step(loss_and_number, **CUT), f"TypeError .* neither a Tensor nor a tuple of Tensors; {JOIN}"),
    (step(loss_and_nothing, **CUT), "ValueError .* an empty aux; return the loss alone, without has_aux=True$"),
    (step(scalar, weight_fn=minus_one), rf"ValueError weight is -1.0, .* >= 0 \(float32\); {WEIGHT}"),
    (step(scalar, weight_fn=ones), rf"ValueError weight is a Tensor of shape \(4,\), .*; {WEIGHT}"),
    (step(scalar, weight_fn=two_weights), "ValueError weight_fn returned a tuple of 2, .*; for several losses, "),
    (cached(nothing, mean), f"TypeError encode_fn returned neither a Tensor nor .*; {ROWS}"),
    (cached(vector, mean), rf"ValueError encode_fn .* of shape \(3,\) for 2 samples; {ROWS}"),
    (cached(mixed, mean), f"TypeError encode_fn returned Tensors of Float32, Float16; {ROWS}"),
    (cached(rows, mean_rows), rf"ValueError loss_fn returned a loss of shape \(3,\), {MEAN}$"),
    (cached(rows, pair), "TypeError loss_fn returned 2 values, expected the loss alone$"),
    ({"cell": rows}, r"ValueError the network returned a loss of shape \(4, 3\), expected shape \(\); return the mean "
                     r"over the samples; if it computes no loss, give TrainOneStepCell\(nn\.WithLossCell\("),
    ({"cell": three_values}, r"TypeError the network returned 3 values, .*give TrainOneStepCell\(nn\.WithLossCell\("),
    (step(scalar), ACCEPTED),  # the control
]


class Calling(nn.Cell):
    def __init__(self, function):
        super().__init__(auto_prefix=False)
        self.network, self.function = NETWORK, function

    def construct(self, x):
        return self.function(x)


class CausalLMOutput(OrderedDict):
    """As that of transformers: a dict, which an index takes for a tuple."""

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]


@dataclass
class Outputs:
    loss: Tensor
    logits: Tensor


def model_of(returns):
    """A model whose output holds the loss, and a function that takes its first entry."""
    def model(x):
        logits = NETWORK(x)
        loss = logits.mean()
        if returns == "CausalLMOutput":
            return CausalLMOutput(loss=loss, logits=logits)
        if returns == "Outputs":
            return Outputs(loss=loss, logits=logits)
        if returns == "dict":
            return {"loss": loss, "logits": logits}
        return loss, logits

    def first(x):
        return model(x)[0]

    return Calling(model), first


def cases_of_models(mode):
    """A graph cannot read a Python object, nor take a part of it. The last one, the control, is the remedy."""
    for returns in ("CausalLMOutput", "Outputs", "dict"):
        (model, first), unreadable = model_of(returns), mode == "graph" and returns != "dict"
        got = "a Python object that a graph cannot read" if unreadable else f"a value of type {returns}"
        remedy = "return its entry for the loss" if returns == "dict" else "take the loss from a tuple, .*return_dict=F"
        for functions, expected in [
                (step(model), "the loss alone"), ({"cell": model}, "the loss alone"),
                (step(model, has_aux=True), r"\(loss, aux\) because"), *[(step(first), "the loss alone")] * unreadable]:
            name = "the network" if "cell" in functions else "forward_fn"
            yield functions, f"TypeError {name} returned {got}, expected {expected}.*[;,] {remedy}"
    yield step(model_of("a tuple")[1]), ACCEPTED


def refusal(functions):
    """The kind and the first line of the error; or what it did instead."""
    given, built = {"optimizer": sgd(NETWORK), "accumulate_step": 2}, None
    try:
        if "cell" in functions:
            cell = functions["cell"]
            built = TrainOneStepCell(cell if isinstance(cell, nn.Cell) else Calling(cell), **given)
        elif "encode_fn" in functions:
            built = make_grad_cache_step(pieces=2, **given, **functions)
        else:
            built = make_train_step(**given, **functions)
        built(Tensor(np.ones((4, 2)), ms.float32))
        text = "accepted"
    except (TypeError, ValueError) as error:
        text = f"{type(error).__name__} {str(error).splitlines()[0]}"
        recover()
    accumulator = getattr(built, "accumulator", None)
    changed = accumulator is not None and (int(accumulator.mini_step) > 0 or float(accumulator.weight_sum) > 0)
    return text + " and changed the window" * changed


@pytest.mark.fresh_process("graph")
@pytest.mark.parametrize(("mode", "every"), [
    ("pynative", 3), *(pytest.param(mode, 1, marks=pytest.mark.slow) for mode in ("graph", "pynative"))])
def test_functions_that_return_what_cannot_be_used_are_refused(mode, every):
    """After such an error MindSpore 2.10 now and then cannot compile another gradient."""
    with running(mode):
        for functions, message in [*CASES, *cases_of_models(mode)][every - 1::every]:
            assert re.match(message, refusal(functions)), functions


class Weighed(nn.Cell):
    """A loss, of a batch that has its weight beside it."""

    def __init__(self):
        super().__init__()
        self.network = MLP()

    def construct(self, x, y, counted):
        return LOSS(self.network(x), y)


@pytest.mark.parametrize(("make", "mode", "on_nonfinite", "bad"), [
    (make_train_step, "jit", "apply", np.nan), (make_train_step, "pynative", "skip_microbatch", np.inf),
    pytest.param(make_train_step, "jit", "apply", -1.0, marks=pytest.mark.slow),
    (TrainOneStepCell, "pynative", "apply", -0.5),
    (make_train_step, "pynative", "skip_window", np.nan), (TrainOneStepCell, "pynative", "apply", np.inf)])
def test_a_weight_that_is_not_finite_shows_in_the_loss(make, mode, on_nonfinite, bad):
    network, batch = Weighed(), tensors(*batches([4])[0])
    before = values(network.trainable_params())

    def weight_fn(x, y, counted):
        return counted.sum()

    train_step = make(network, sgd(network), 1, weight_fn=weight_fn, on_nonfinite=on_nonfinite)
    skipped = on_nonfinite != "apply"
    with running(mode):
        assert np.isnan(float(train_step(*batch, Tensor([bad]))))
        assert int(train_step.accumulator.skipped) == skipped
        assert (difference(values(network.trainable_params()), before) == 0) == skipped
        assert np.isfinite(float(train_step(*batch, Tensor([1.0])))) == skipped
    assert np.isfinite(values(network.trainable_params())[0]).all() == skipped


class MeanOf(nn.Cell):
    def construct(self, x):
        return x.mean()


@pytest.mark.parametrize(("make", "way"), [
    (make_train_step, "jit"), pytest.param(TrainOneStepCell, "graph", marks=pytest.mark.slow),
    (TrainOneStepCell, "pynative")])
def test_a_sparse_embedding_is_refused_and_a_dense_one_trains(make, way):
    """As the error says: with `sparse=False`. Control: the dense one moves the rows that were looked up."""
    def trained(**options):
        with running(way):
            lookup = nn.EmbeddingLookup(10, 4, param_init="ones", **options)
            step = make(nn.SequentialCell(lookup, MeanOf()), nn.Adam(lookup.trainable_params(), 0.1), 1)
            step(Tensor([[1, 2, 7]], ms.int32))
        return np.flatnonzero((lookup.embedding_table.asnumpy() != 1).any(1)).tolist()

    message = r"embedding_table (is not a Tensor|has shape \(3, 4\)), expected .*\(10, 4\).* and sparse=False"
    with pytest.raises((TypeError, ValueError), match=message):
        trained()
    assert trained(target="DEVICE", sparse=False) == [1, 2, 7]

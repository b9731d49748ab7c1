"""What the functions of a train step return: what cannot be used is refused and changes nothing; NaN as a weight."""
# ruff: noqa: E731 - a lambda in a statement of its own can be compiled, too
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Optional

import mindspore as ms
import numpy as np
import pytest
from conftest import MLP, batches, difference, recover, tensors, values
from following import LOSS, run_as
from mindspore import Tensor, nn, ops

from ms_accum import Accumulator, TrainOneStepCell, make_grad_cache_step, make_train_step

NETWORK = nn.Dense(2, 3)
nothing = lambda x: None
rows = lambda x: NETWORK(x)
vector = lambda x: NETWORK(x).mean(0)
mixed = lambda x: (NETWORK(x), NETWORK(x).astype(ms.float16))
scalar = lambda x: NETWORK(x).mean()
count = lambda x: (NETWORK(x) > 0).sum()
three_values = lambda x: (NETWORK(x).mean(), x, x)
loss_and_vector = lambda x: (NETWORK(x).mean(), NETWORK(x).mean(0))
loss_and_number = lambda x: (NETWORK(x).mean(), (NETWORK(x), 3))
loss_and_nothing = lambda x: (NETWORK(x).mean(), ())
losses = lambda x: (NETWORK(x).mean(), x.mean(), x.mean())
minus_one = lambda x: -1.0
ones = lambda x: ops.ones(4)
two_weights = lambda x: (1.0, 2.0)
mean = lambda *z: z[0].mean()
mean_rows = lambda z: z.mean(0)
pair = lambda z: (z.mean(), z)

ALONE = "the loss alone"
AUX = "(loss, aux) because of has_aux=True; aux may be a tuple"
TWO = "a tuple of 2 because of losses=2"
JOIN = "return Tensors of shape () or with one row for each sample, or give pieces=1"
ROWS = "return a Tensor with a row per sample, or a tuple of such Tensors of one float dtype"
WEIGHT = "give the number of samples or unmasked tokens in the microbatch"
MEAN = "expected shape (); return the mean over the samples"
CUT = {"has_aux": True, "pieces": 2}
ENTRY = (f"expected {TWO}, an entry for each; let weight_fn return as many weights, or give losses= (in a shell: "
         "--losses) as many")
ACCEPTED = "accepted and changed the window"

# What is given to make_train_step, or with `loss_fn` to make_grad_cache_step, and the first line of the message.
CASES = [
    ({"forward_fn": scalar, "has_aux": True}, f"TypeError forward_fn returned a value of type Tensor, expected {AUX}"),
    ({"forward_fn": nothing}, f"TypeError forward_fn returned None, expected {ALONE}"),
    ({"forward_fn": three_values, "has_aux": True}, f"TypeError forward_fn returned 3 values, expected {AUX}"),
    ({"forward_fn": three_values}, f"TypeError forward_fn returned 3 values, expected {ALONE}; give has_aux=True if it "
     "returns (loss, aux), losses=2 if it returns two losses"),
    ({"forward_fn": rows}, f"ValueError forward_fn returned a loss of shape (4, 3), {MEAN}"),
    ({"forward_fn": count},
     "TypeError forward_fn returned a loss of Int64, expected a float dtype; do not cast the network's loss"),
    ({"forward_fn": loss_and_vector, **CUT},
     f"ValueError forward_fn returned aux of shape (3,) for a piece of 2 samples; {JOIN}"),
    ({"forward_fn": loss_and_number, **CUT},
     f"TypeError forward_fn returned aux that is neither a Tensor nor a tuple of Tensors; {JOIN}"),
    ({"forward_fn": loss_and_nothing, **CUT},
     "ValueError forward_fn returned an empty aux; return the loss alone, without has_aux=True"),
    ({"forward_fn": scalar, "weight_fn": minus_one},
     f"ValueError weight is -1.0, expected a finite number >= 0 (float32); {WEIGHT}"),
    ({"forward_fn": scalar, "weight_fn": ones},
     f"ValueError weight is a Tensor of shape (4,), expected shape (); {WEIGHT}"),
    ({"forward_fn": scalar, "weight_fn": two_weights},
     "ValueError weight_fn returned a tuple of 2, expected one number or Tensor; give losses=2 to make_train_step if "
     "forward_fn returns as many losses, each with a weight of its own"),
    ({"forward_fn": scalar, "losses": 2}, f"TypeError forward_fn returned a value of type Tensor, expected {TWO}"),
    ({"forward_fn": losses, "losses": 2},
     f"TypeError forward_fn returned 3 losses, expected {TWO}; with has_aux=True, ((loss, loss), aux)"),
    ({"forward_fn": losses, "losses": 2, "weight_fn": minus_one}, f"ValueError weight is no tuple, {ENTRY}"),
    ({"encode_fn": nothing, "loss_fn": mean},
     f"TypeError encode_fn returned neither a Tensor nor a tuple of Tensors; {ROWS}"),
    ({"encode_fn": vector, "loss_fn": mean},
     f"ValueError encode_fn returned a Tensor of shape (3,) for 2 samples; {ROWS}"),
    ({"encode_fn": mixed, "loss_fn": mean}, f"TypeError encode_fn returned Tensors of Float32, Float16; {ROWS}"),
    ({"encode_fn": rows, "loss_fn": mean_rows}, f"ValueError loss_fn returned a loss of shape (3,), {MEAN}"),
    ({"encode_fn": rows, "loss_fn": pair}, f"TypeError loss_fn returned 2 values, expected {ALONE}"),
    ({"cell": rows}, f"ValueError forward_fn returned a loss of shape (4, 3), {MEAN}"),
    ({"forward_fn": scalar}, ACCEPTED),  # the control
]


class Calling(nn.Cell):
    def __init__(self, function):
        super().__init__(auto_prefix=False)
        self.network, self.function = NETWORK, function

    def construct(self, x):
        return self.function(x)


class ModelOutput(OrderedDict):
    """As that of transformers: a dict of what is not None, which an index takes for a tuple."""

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]


@dataclass
class CausalLMOutput(ModelOutput):
    loss: Optional[Tensor] = None
    logits: Optional[Tensor] = None


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
        got = f"a value of type {returns}"
        if unreadable:
            got = "a Python object that no graph can read, such as a ModelOutput or a dataclass, or a part of one"
        remedy = 'return its entry for the loss, e.g. outputs["loss"]' if returns == "dict" else (
            "take the loss from a tuple, in a function or in the construct of a loss cell: "
            "return model(..., return_dict=False)[0]")
        for functions, expected in [
                ({"forward_fn": model}, ALONE), ({"cell": model}, ALONE), ({"forward_fn": model, "has_aux": True}, AUX),
                ({"forward_fn": model, "losses": 2}, TWO), *[({"forward_fn": first}, ALONE)] * unreadable]:
            yield functions, f"TypeError forward_fn returned {got}, expected {expected}; {remedy}"
    yield {"forward_fn": model_of("a tuple")[1]}, ACCEPTED


def refusal(functions):
    """The kind and the first line of the error; or what it did instead."""
    windows = 1 if "losses" in functions else 2
    acc = Accumulator(nn.SGD(NETWORK.trainable_params(), 0.1), windows, reduction="mean")
    try:
        if "cell" in functions:
            cell = functions["cell"]
            step = TrainOneStepCell(cell if isinstance(cell, nn.Cell) else Calling(cell), acc)
        elif "encode_fn" in functions:
            step = make_grad_cache_step(optimizer=acc, pieces=2, **functions)
        else:
            step = make_train_step(optimizer=acc, **functions)
        step(Tensor(np.ones((4, 2)), ms.float32))
        text = "accepted"
    except (TypeError, ValueError) as error:
        text = f"{type(error).__name__} {str(error).splitlines()[0]}"
        recover()
    return text + " and changed the window" * (int(acc.mini_step) > 0 or float(acc.weight_sum) > 0)


@pytest.mark.fresh_process("graph")
@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_functions_that_return_what_cannot_be_used_are_refused(mode, mode_named):
    """After such an error MindSpore 2.10 now and then cannot compile another gradient."""
    mode_named(mode)
    with run_as(mode):
        cases = [*CASES, *cases_of_models(mode)]
        assert [refusal(functions) for functions, _ in cases] == [message for _, message in cases]


@pytest.mark.parametrize(("mode", "on_nonfinite"), [
    ("jit", "apply"), ("pynative", "skip_microbatch"), ("pynative", "skip_window")])
def test_a_weight_that_is_not_finite_shows_in_the_loss(mode, on_nonfinite):
    network, (x, y) = MLP(), batches([4])[0]
    before = values(network.trainable_params())

    def forward_fn(x, y, counted):
        return LOSS(network(x), y)

    def weight_fn(x, y, counted):
        return counted.sum()

    optimizer = nn.SGD(network.trainable_params(), 0.1)
    train_step = make_train_step(forward_fn, optimizer, 1, weight_fn=weight_fn, on_nonfinite=on_nonfinite)
    with run_as(mode):
        assert np.isnan(float(train_step(*tensors(x, y), Tensor([np.nan]))))
        after = values(network.trainable_params())
        if on_nonfinite == "apply":
            assert all(np.isnan(p).all() for p in after)
            return
        assert difference(after, before) == 0
        assert int(train_step.accumulator.skipped) == 1
        assert np.isfinite(float(train_step(*tensors(x, y), Tensor([1.0]))))
    assert difference(values(network.trainable_params()), before) > 1e-3

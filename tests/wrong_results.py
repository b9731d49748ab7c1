"""Functions that return what no driver can use, and how each is refused."""
# ruff: noqa: E731 - a lambda in a statement of its own can be compiled, too
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_accum import Accumulator, make_grad_cache_step, make_train_step

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
minus_one = lambda x: -1.0
ones = lambda x: ops.ones(4)
mean = lambda *z: z[0].mean()
mean_rows = lambda z: z.mean(0)
pair = lambda z: (z.mean(), z)

AUX = "expected (loss, aux) because of has_aux=True; aux may be a tuple"
JOIN = "return Tensors of shape () or with one row for each sample, or give micro_size=1"
ROWS = "return a Tensor with a row per sample, or a tuple of such Tensors of one float dtype"
WEIGHT = "give the number of samples or unmasked tokens in the microbatch"
MEAN = "expected shape (); return the mean over the samples"
PIECES = {"has_aux": True, "micro_size": 2}

# What is given to make_train_step, or with `loss_fn` to make_grad_cache_step, and the first line of the message.
CASES = [
    ({"forward_fn": scalar, "has_aux": True}, f"TypeError forward_fn returned no tuple, {AUX}"),
    ({"forward_fn": three_values, "has_aux": True}, f"TypeError forward_fn returned 3 values, {AUX}"),
    ({"forward_fn": three_values},
     "TypeError forward_fn returned no Tensor, expected the loss alone; give has_aux=True if it returns (loss, aux), "
     "losses=2 if it returns two losses"),
    ({"forward_fn": rows}, f"ValueError forward_fn returned a loss of shape (4, 3), {MEAN}"),
    ({"forward_fn": count},
     "TypeError forward_fn returned a loss of Int64, expected a float dtype; do not cast the network's loss"),
    ({"forward_fn": loss_and_vector, **PIECES},
     f"ValueError forward_fn returned aux of shape (3,) for a piece of 2 samples; {JOIN}"),
    ({"forward_fn": loss_and_number, **PIECES},
     f"TypeError forward_fn returned aux that is neither a Tensor nor a tuple of Tensors; {JOIN}"),
    ({"forward_fn": loss_and_nothing, **PIECES},
     "ValueError forward_fn returned an empty aux; return the loss alone, without has_aux=True"),
    ({"forward_fn": scalar, "weight_fn": minus_one}, f"ValueError weight is -1.0, expected a finite number >= 0 (float32); {WEIGHT}"),
    ({"forward_fn": scalar, "weight_fn": ones}, f"ValueError weight is a Tensor of shape (4,), expected shape (); {WEIGHT}"),
    ({"encode_fn": nothing, "loss_fn": mean}, f"TypeError encode_fn returned neither a Tensor nor a tuple of Tensors; {ROWS}"),
    ({"encode_fn": vector, "loss_fn": mean}, f"ValueError encode_fn returned a Tensor of shape (3,) for 2 samples; {ROWS}"),
    ({"encode_fn": mixed, "loss_fn": mean}, f"TypeError encode_fn returned Tensors of Float32, Float16; {ROWS}"),
    ({"encode_fn": rows, "loss_fn": mean_rows}, f"ValueError loss_fn returned a loss of shape (3,), {MEAN}"),
    ({"encode_fn": rows, "loss_fn": pair}, "TypeError loss_fn returned no Tensor, expected the loss alone"),
]


def refusal(functions):
    """The kind and the first line of the error; or what it did instead."""
    acc = Accumulator(nn.SGD(NETWORK.trainable_params(), 0.1), 2, reduction="mean")
    make = make_grad_cache_step if "encode_fn" in functions else make_train_step
    options = {"micro_size": 2} if "encode_fn" in functions else {}
    try:
        make(accumulator=acc, **options, **functions)(Tensor(np.ones((4, 2)), ms.float32))
    except (TypeError, ValueError) as error:
        changed = " and changed the window" if int(acc.mini_step) else ""
        return f"{type(error).__name__} {str(error).splitlines()[0]}{changed}"
    return "accepted"

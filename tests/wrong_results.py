"""Functions that return what no driver can use. As a script, prints how each is refused in a compiled step.

A process of its own, for after such an error MindSpore 2.10 now and then cannot compile another gradient.
"""
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_accum import Accumulator, make_grad_cache_step, make_train_step

NETWORK = nn.Dense(2, 3)
AUX = "expected (loss, aux), as has_aux=True says; aux may be a tuple"
JOIN = "return Tensors of shape () or with one row for each sample, or give micro_size=1"
ROWS = "return a Tensor with a row for each sample, or a tuple of such Tensors of one float dtype"
WEIGHT = "give the number of samples or unmasked tokens in the microbatch"
MEAN = "expected shape (); give the mean over the samples"


def nothing(x):
    NETWORK(x)


def rows(x):
    return NETWORK(x)


def vector(x):
    return NETWORK(x).mean(0)


def mixed(x):
    return NETWORK(x), NETWORK(x).astype(ms.float16)


def scalar(x):
    return NETWORK(x).mean()


def count(x):
    return (NETWORK(x) > 0).sum()


def three_values(x):
    return NETWORK(x).mean(), x, x


def loss_and_vector(x):
    return NETWORK(x).mean(), NETWORK(x).mean(0)


def loss_and_number(x):
    return NETWORK(x).mean(), (NETWORK(x), 3)


def loss_and_nothing(x):
    return NETWORK(x).mean(), ()


def minus_one(x):
    return -1.0


def ones(x):
    return ops.ones(4)


def mean(*z):
    return z[0].mean()


def mean_rows(z):
    return z.mean(0)


def pair(z):
    return z.mean(), z


# What is given to make_train_step, or with `loss_fn` to make_grad_cache_step, and the first line of the message.
CASES = [
    ({"forward_fn": scalar, "has_aux": True}, f"TypeError forward_fn returned no tuple, {AUX}"),
    ({"forward_fn": three_values, "has_aux": True}, f"TypeError forward_fn returned 3 values, {AUX}"),
    ({"forward_fn": three_values},
     "TypeError forward_fn returned no Tensor, expected the loss alone; give has_aux=True if it returns (loss, aux)"),
    ({"forward_fn": rows}, f"ValueError forward_fn returned a loss of shape (4, 3), {MEAN}"),
    ({"forward_fn": count},
     "TypeError forward_fn returned a loss of Int64, expected a float dtype; leave the loss as the network computed it"),
    ({"forward_fn": loss_and_vector, "has_aux": True, "micro_size": 2},
     f"ValueError forward_fn returned aux of shape (3,) for a piece of 2 samples; {JOIN}"),
    ({"forward_fn": loss_and_number, "has_aux": True, "micro_size": 2},
     f"TypeError forward_fn returned aux that is no Tensor and no tuple of Tensors, which cannot be joined; {JOIN}"),
    ({"forward_fn": loss_and_nothing, "has_aux": True, "micro_size": 2},
     "ValueError forward_fn returned an empty aux; return the loss alone, without has_aux=True"),
    ({"forward_fn": scalar, "weight_fn": minus_one}, f"ValueError weight is -1.0, expected a finite number >= 0 (float32); {WEIGHT}"),
    ({"forward_fn": scalar, "weight_fn": ones}, f"ValueError weight is a Tensor of shape (4,), expected shape (); {WEIGHT}"),
    ({"encode_fn": nothing, "loss_fn": mean}, f"TypeError encode_fn returned what is no Tensor and no tuple of Tensors; {ROWS}"),
    ({"encode_fn": vector, "loss_fn": mean}, f"ValueError encode_fn returned a Tensor of shape (3,) for a piece of 2 samples; {ROWS}"),
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
        make(acc=acc, **options, **functions)(Tensor(np.ones((4, 2)), ms.float32))
    except (TypeError, ValueError) as error:
        changed = " and changed the window" if int(acc.mini_step) else ""
        return f"{type(error).__name__} {str(error).splitlines()[0]}{changed}"
    return "accepted"


if __name__ == "__main__":
    for functions, _ in CASES:
        print(refusal(functions))

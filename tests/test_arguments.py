"""Hostile use: junk arguments and bad calls. Each is taken, or refused in words and changes no bit."""
import inspect
import re
from decimal import Decimal
from fractions import Fraction

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from ms_accum import Accumulator, DataParallel, TrainOneStepCell, make_grad_cache_step, make_train_step
from ms_accum.core.accumulator import Options
from ms_accum.selftest.comparing import values

INF, NAN = float("inf"), float("nan")
SHAPES = ((2, 3), (), (4,))
JUNK = {
    "None": None, "True": True, "0": 0, "-1": -1, "2": 2, "2.5": 2.5, "nan": NAN, "inf": INF, "1e-300": 1e-300,
    "2**31": 2**31, "10**400": 10**400, "1j": 1j, "1/3": Fraction(1, 3), "Decimal": Decimal(2), "text": "x",
    "bytes": b"x", "list": [], "dict": {}, "tuple": (1,), "array": np.array([1, 2]), "array()": np.array(3),
    "np.bool": np.bool_(True), "np.float32": np.float32(2), "Tensor": Tensor([1, 2]), "Tensor()": Tensor(3),
    "dtype": ms.float32, "object": object(), "class": object, "function": len,
}
WHOLE = {"2", "array()", "Tensor()"}
ACCEPTED = {
    (Accumulator, "optimizer"): set(),
    (Accumulator, "accumulate_step"): WHOLE,
    (Accumulator, "clip_norm"): {"None", "2", "2.5", "inf", "1e-300", "2**31", "10**400", "1/3", "np.float32"},
    (Accumulator, "reduction"): set(),
    (Accumulator, "min_weight"): {"None", "2", "2.5", "1e-300", "2**31", "1/3", "np.float32"},
    (Accumulator, "buffer_dtype"): {"None", "dtype"},
    (Accumulator, "on_nonfinite"): set(),
    (Accumulator, "max_skips"): WHOLE | {"None", "0", "2**31", "10**400"},
    (Accumulator, "reducer"): {"None"},
    (Accumulator, "stages"): {"list"},
    (Accumulator, "loss_scaler"): {"None"},
    (make_train_step, "forward_fn"): {"class", "function"},
    (make_train_step, "optimizer"): set(),
    (make_train_step, "pieces"): WHOLE | {"2**31", "10**400"},
    (make_train_step, "batch_axis"): WHOLE | {"0", "2**31", "10**400"},
    (make_train_step, "weight_fn"): {"None", "class", "function"},
    (make_train_step, "has_aux"): {"True"},
    (make_train_step, "loss_reduction"): set(),
    (make_train_step, "network"): {"None"},
    (DataParallel, "sync"): {"None"},
    (DataParallel, "zero"): {"0", "2"},
    (DataParallel, "bucket_mib"): {"2", "2.5", "1e-300", "2**31", "1/3", "np.float32"},
}


def refusal(function, **changed):
    """What `function` says when it refuses an argument beside others that fit, None if it takes it."""
    optimizer = nn.SGD([Parameter(Tensor(np.zeros(3), ms.float32), name="w")], 0.1)
    fitting = {"optimizer": optimizer, "accumulate_step": 2}
    if function is make_train_step:
        fitting["forward_fn"] = nn.CrossEntropyLoss()
    elif function is Accumulator:
        fitting["reduction"] = "sum"
    else:
        fitting = {}
    try:
        function(**{**fitting, **changed})
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize(("function", "argument"), ACCEPTED)
def test_an_argument_is_taken_or_refused_by_its_name(function, argument):
    """Refused are exactly those that cannot be meant: "<argument> is ..., expected ..."."""
    messages = {name: refusal(function, **{argument: junk}) for name, junk in JUNK.items()}
    assert {name for name, message in messages.items() if message is None} == ACCEPTED[function, argument]
    for message in filter(None, messages.values()):
        assert re.match(rf"(?s){argument}(\[0\])?( is .*, expected .|=.*; (give|define it) )", message)


def test_options_have_one_place():
    """What the three doors take beside their own arguments is what `Options` names."""
    for make in (make_train_step, make_grad_cache_step, TrainOneStepCell.__init__):
        assert not {*inspect.signature(make).parameters} & {*Options.__annotations__}


def good(value=1.0):
    return tuple([Tensor(np.full(shape, value), ms.float32) for shape in SHAPES])


COMPLEX = tuple([gradient.astype(ms.complex64) for gradient in good()])
BAD_CALLS = [  # method, arguments, and the beginning of what is said
    ("add", (good()[:2],), r"grads holds 2 gradients, expected 3"),
    ("__call__", (good()[::-1],), r"the gradient of p0 has shape \(4,\), expected \(2, 3\)"),
    ("__call__", (good()[0],), r"grads is not a tuple of Tensors"),
    ("__call__", ((*good()[:2], None), 1.0), r"the gradient of p2 is not a Tensor"),
    ("__call__", (COMPLEX,), r"the gradient of p0 is of Complex64, expected a real dtype"),
    ("add", (good(), -1), r"weight is -1, expected a finite number >= 0"),
    ("__call__", (good(), NAN), r"weight is nan, expected a finite number >= 0"),
    ("__call__", (good(), 1e39), r"weight is (1e\+39|inf), expected a finite number"),
    ("add", (good(), None), r"weight is None, expected a number"),
    ("__call__", (good(), True), r"weight is True, expected a number"),
    ("add", (good(), "1"), r"weight is '1', expected a number"),
    ("__call__", (good(), Tensor([1.0, 2.0])), r"weight is a Tensor of shape \(2,\), expected shape \(\)"),
    ("__call__", (good(), Tensor(1j, ms.complex64)), r"weight is a Tensor of Complex64, expected a real number"),
    ("close_if", (None,), r"condition is neither a Tensor nor a bool"),
    ("close_if", (Tensor([True, True]),), r"condition is a Tensor of shape \(2,\), expected shape \(\)"),
]


@pytest.mark.parametrize("jit", [False, True])
def test_a_bad_call_is_refused_and_changes_no_bit(jit):
    """And the next good one is taken as if nothing had happened."""
    weights = [Parameter(Tensor(np.ones(shape), ms.float32), name=f"p{i}") for i, shape in enumerate(SHAPES)]
    acc = Accumulator(nn.Momentum(weights, 0.1, 0.5), 3, INF, reduction="mean", on_nonfinite="skip_window")
    for _ in range(4):
        acc(good(), 2.0)
    state = [acc.window.counts, acc.window.sums, acc.window.seen, *acc.window.buffers,
             *acc.window.optimizer.get_parameters()]
    before = [p.asnumpy().tobytes() for p in state]
    for method, arguments, message in BAD_CALLS:
        def call(*arguments, method=method):
            return getattr(acc, method)(*arguments)

        with pytest.raises((TypeError, ValueError), match=message):
            (ms.jit(call) if jit else call)(*arguments)
        assert [p.asnumpy().tobytes() for p in state] == before, message
    moved = values(weights)
    assert [bool(acc(good(), 2.0)) for _ in range(2)] == [False, True]
    assert all((a != b).any() for a, b in zip(values(weights), moved))

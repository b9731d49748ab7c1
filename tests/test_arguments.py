"""Argument checks: what they return and how they refuse. What is junk for which argument is in test_hostile.py."""
from collections.abc import Callable
from functools import partial
from math import inf, nan

import numpy as np
import pytest
from mindspore import Tensor

from ms_accum.arguments import boolean, instance_of, number, one_of, require_callable, spelled, whole_number


@spelled({"micro_size": "is now called pieces: give pieces=4"})
def step(forward_fn, *, pieces=1):
    return forward_fn, pieces


def positive(value):
    return value > 0


rate = partial(number, "rate", accepts=positive, expected="a number > 0")
UNREADABLE = r"^weight_fn is a lambda whose source MindSpore cannot read, .* with def"


@pytest.mark.parametrize(("error", "message", "call"), [
    (TypeError, r"^n is 2\.0 of type float, expected an int >= 1; give 2$", partial(whole_number, "n", 2.0, "give 2")),
    (TypeError, r"^n is True of type bool, expected an int >= 1$", partial(whole_number, "n", True)),
    (ValueError, r"^n is 0, expected an int >= 1; give 2$", partial(whole_number, "n", Tensor(0), "give 2")),
    (ValueError, r"^n is 3, expected at most 2; give fewer$", partial(whole_number, "n", 3, "give fewer", maximum=2)),
    (TypeError, r"^rate is '1' of type str, expected a number > 0$", partial(rate, "1")),
    (ValueError, r"^rate is nan, expected a number > 0$", partial(rate, nan)),
    (TypeError, r"^flag is 1 of type int, expected True or False; say it$", partial(boolean, "flag", 1, "say it")),
    (ValueError, r"^rule is 'x', expected one of 'a', 'b'$", partial(one_of, "rule", "x", ("a", "b"))),
    (ValueError, r"(?s)^rule is .*, expected one of 'a'$", partial(one_of, "rule", np.array(["a", "b"]), ("a",))),
    (TypeError, r"^hook is of type int, expected a str; omit$", partial(instance_of, "hook", 3, str, "a str", "omit")),
    (TypeError, r"^micro_size is now called pieces: give pieces=4$", partial(step, 3, micro_size=4)),
    (TypeError, r"^step\(\) got an unexpected argument piece; did you mean pieces\?$", partial(step, 3, piece=4)),
    (TypeError, r"unexpected argument xyz; expected one of forward_fn, pieces$", partial(step, 3, xyz=4)),
    (TypeError, r"^loss is of type int, expected a function of the batch$", partial(require_callable, "loss", 3)),
    (TypeError, UNREADABLE, partial(require_callable, "weight_fn", (lambda x: x, 0)[0])),
    (TypeError, UNREADABLE, partial(require_callable, "weight_fn", eval("lambda x: x"))),
])
def test_what_is_refused_and_how(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_what_is_returned():
    for two in (2, np.int8(2), np.array(2), Tensor(2), Tensor([2])):
        assert (whole_number("n", two), type(whole_number("n", two))) == (2, int)
    assert [number("rate", sign * 10**400, lambda x: True, "") for sign in (1, -1)] == [inf, -inf]
    assert (boolean("flag", False), one_of("device", None, ("CPU", None)), instance_of("hook", len, Callable, "")) == (
        False, None, len)
    assert step(3, pieces=4) == (3, 4)
    readable = lambda x: x  # noqa: E731
    require_callable("forward_fn", readable)
    require_callable("forward_fn", len)

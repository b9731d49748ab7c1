"""Argument checks: what they return and how they refuse. What is junk for which argument is in test_hostile.py."""
from collections.abc import Callable
from math import inf, nan

import numpy as np
import pytest
from mindspore import Tensor

from ms_accum.arguments import boolean, instance_of, number, one_of, require_callable, spelled, whole_number


@pytest.mark.parametrize(("error", "message", "check", "arguments"), [
    (TypeError, r"^n is 2\.0 of type float, expected an int >= 1; give 2$", whole_number, ("n", 2.0, "give 2")),
    (TypeError, r"^n is True of type bool, expected an int >= 1$", whole_number, ("n", True)),
    (ValueError, r"^n is 0, expected an int >= 1; give 2$", whole_number, ("n", Tensor(0), "give 2")),
    (TypeError, r"^rate is '1' of type str, expected a number > 0$", number, ("rate", "1", lambda x: x > 0, "a number > 0")),
    (ValueError, r"^rate is nan, expected a number > 0$", number, ("rate", nan, lambda x: x > 0, "a number > 0")),
    (TypeError, r"^flag is 1 of type int, expected True or False; say which$", boolean, ("flag", 1, "say which")),
    (ValueError, r"^rule is 'x', expected one of 'a', 'b'$", one_of, ("rule", "x", ("a", "b"))),
    (ValueError, r"(?s)^rule is .*, expected one of 'a'$", one_of, ("rule", np.array(["a", "b"]), ("a",))),
    (TypeError, r"^hook is of type int, expected a str; leave it out$", instance_of, ("hook", 3, str, "a str", "leave it out")),
])
def test_what_is_refused_and_how(error, message, check, arguments):
    with pytest.raises(error, match=message):
        check(*arguments)


def test_what_is_returned():
    for two in (2, np.int8(2), np.array(2), Tensor(2), Tensor([2])):
        assert (whole_number("n", two), type(whole_number("n", two))) == (2, int)
    with pytest.raises(ValueError, match=r"^n is 3, expected at most 2; give fewer$"):
        whole_number("n", 3, "give fewer", maximum=2)
    assert [number("rate", sign * 10**400, lambda x: True, "") for sign in (1, -1)] == [inf, -inf]
    assert (boolean("flag", False), one_of("device", None, ("CPU", None)), instance_of("hook", len, Callable, "")) == (False, None, len)


@spelled({"micro_size": "is now called pieces: give pieces=4"})
def step(forward_fn, *, pieces=1):
    return forward_fn, pieces


def test_unknown_names_are_answered_with_what_was_meant():
    assert step(3, pieces=4) == (3, 4)
    for message, options in ((r"^micro_size is now called pieces: give pieces=4$", {"micro_size": 4}),
                             (r"^step\(\) got an unexpected argument piece; did you mean pieces\?$", {"piece": 4}),
                             (r"unexpected argument xyz; expected one of forward_fn, pieces$", {"xyz": 4})):
        with pytest.raises(TypeError, match=message):
            step(3, **options)


def test_lambdas_that_cannot_be_compiled_are_refused():
    readable = lambda x: x  # noqa: E731
    require_callable("forward_fn", readable)
    require_callable("forward_fn", len)
    with pytest.raises(TypeError, match=r"^forward_fn is of type int, expected a function of the batch$"):
        require_callable("forward_fn", 3)
    for function in ((lambda x: x, 0)[0], eval("lambda x: x")):
        with pytest.raises(TypeError, match=r"^weight_fn is a lambda whose source MindSpore cannot read, .* with def"):
            require_callable("weight_fn", function)

"""Argument checks: what they take and return, what they refuse, and how they say so."""
from collections.abc import Callable
from fractions import Fraction
from math import inf, nan

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Tensor

from ms_accum.arguments import LARGEST_INT32, boolean, instance_of, number, one_of, require_callable, whole_number

CONVERSIONS = [int, np.int8, np.uint16, np.int64, np.array, lambda n: Tensor(n, ms.int32), lambda n: Tensor([n])]
NO_INTEGERS = [True, False, np.True_, np.array(True), Tensor(True), Tensor([True]), 2.0, np.float32(2), Tensor(2.0), Tensor([2, 2]),
               np.array([2]), np.array([2, 2]), "2", None, [2], Fraction(2), 2j]


@given(st.integers(-9, 99), st.sampled_from(CONVERSIONS), st.integers(-5, 5), st.integers(6, 50))
def test_whole_number(value, convert, minimum, maximum):
    given_value = convert(max(value, 0) if convert is np.uint16 else value)
    value = int(given_value)
    if minimum <= value <= maximum:
        got = whole_number("pieces", given_value, minimum=minimum, maximum=maximum)
        assert (got, type(got)) == (value, int)
        return
    expected = f"an int >= {minimum}" if value < minimum else f"at most {maximum}"
    with pytest.raises(ValueError, match=f"^pieces is {value}, expected {expected}; give fewer$"):
        whole_number("pieces", given_value, "give fewer", minimum=minimum, maximum=maximum)


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_no_whole_number(value):
    with pytest.raises(TypeError, match=r"(?s)^pieces is .* of type \w+, expected an int >= 2; give 2$") as caught:
        whole_number("pieces", value, "give 2", minimum=2)
    assert f"of type {type(value).__name__}," in str(caught.value)


def test_a_number_has_no_largest_unless_one_is_given():
    assert whole_number("bytes", 10**30) == 10**30
    with pytest.raises(ValueError, match=r"^length is 2147483648, expected at most 2147483647; give less$"):
        whole_number("length", LARGEST_INT32 + 1, "give less", maximum=LARGEST_INT32)


@given(st.one_of(st.integers(), st.floats(), st.fractions(), st.just(10**400), st.just(-10**400), st.floats(width=32).map(np.float32)))
def test_number(value):
    accepted = value > 0
    if accepted:
        got = number("rate", value, lambda x: x > 0, "a number > 0")
        assert (got, type(got)) == (float(value) if value < 10**300 else got, float)
        return
    with pytest.raises(ValueError, match=r"^rate is \S+, expected a number > 0; give 1$"):
        number("rate", value, lambda x: x > 0, "a number > 0", "give 1")


def test_a_number_too_large_for_a_float_is_infinite():
    assert (number("rate", 10**400, lambda x: True, ""), number("rate", -10**400, lambda x: True, "")) == (inf, -inf)
    with pytest.raises(ValueError, match=r"rate is nan, expected a number < 1$"):
        number("rate", nan, lambda x: x < 1, "a number < 1")


@pytest.mark.parametrize("value", [True, np.True_, "1", None, 1j, [1.0], Tensor(1.0), np.array([1.0])], ids=repr)
def test_no_number(value):
    with pytest.raises(TypeError, match=r"^rate is .* of type \w+, expected a number > 0; give 1$"):
        number("rate", value, lambda x: x > 0, "a number > 0", "give 1")


def test_booleans_choices_and_types_are_returned_or_refused():
    assert boolean("flag", False) is False
    assert one_of("rule", "sqrt", ("linear", "sqrt")) == "sqrt"
    assert one_of("device", None, ("CPU", None)) is None
    assert instance_of("hook", len, Callable, "a function") is len
    for value in (1, None, np.True_, "yes"):
        with pytest.raises(TypeError, match=r"^flag is .* of type \w+, expected True or False; say which$"):
            boolean("flag", value, "say which")
    for value in ("cubic", None, 2, ["linear"], np.array(["linear", "sqrt"])):
        with pytest.raises(ValueError, match=r"(?s)^rule is .*, expected one of 'linear', 'sqrt'$"):
            one_of("rule", value, ("linear", "sqrt"))
    with pytest.raises(TypeError, match=r"^hook is of type int, expected a str or bytes; leave it out$"):
        instance_of("hook", 3, (str, bytes), "a str or bytes", "leave it out")


def test_lambdas_that_cannot_be_compiled_are_refused():
    readable = lambda x: x  # noqa: E731
    require_callable("forward_fn", readable)
    require_callable("forward_fn", len)
    with pytest.raises(TypeError, match=r"^forward_fn is of type int, expected a function of the batch$"):
        require_callable("forward_fn", 3)
    for function in ((lambda x: x, 0)[0], eval("lambda x: x")):
        with pytest.raises(TypeError, match=r"^weight_fn is a lambda whose source MindSpore cannot read, .* define it with def"):
            require_callable("weight_fn", function)

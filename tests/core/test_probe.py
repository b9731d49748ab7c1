"""Kernels in place run only where they give what the portable ones give."""
import warnings

import mindspore as ms
import pytest
from mindspore import ops
from support.training import sgd

from ms_accum import Accumulator
from ms_accum.core import probe
from ms_accum.core.kernels import InPlace, Portable
from ms_accum.selftest.networks import MLP
from ms_accum.tensors import mapped, scaled

pytestmark = pytest.mark.core
SIZES = (5, 640)


@ms.jit_class
class LikePortable(Portable):
    """In the place of the real ones, which the CPU does not have."""


@ms.jit_class
class NeverClears(Portable):
    def clear(self, zero, buffers):
        pass


@ms.jit_class
class ClearsOne(Portable):
    def clear(self, zero, buffers):
        ops.assign(buffers[0], ops.zeros_like(buffers[0]))


@ms.jit_class
class ScalesByTheSquare(Portable):
    def scale(self, factor, gradients, dtypes):
        return mapped(scaled, factor * factor, gradients, dtypes)


@ms.jit_class
class GivesNan(Portable):
    def scale(self, factor, gradients, dtypes):
        return mapped(scaled, factor * float("nan"), gradients, dtypes)


@ms.jit_class
class ClearsTooEarly(Portable):
    """As a graph would that has lost the order."""

    def scale(self, factor, gradients, dtypes):
        return mapped(_cleared, factor, gradients, dtypes)


def _cleared(factor, buffer, dtype):
    return ops.assign(buffer, ops.zeros_like(buffer)) * factor


WRONG = (NeverClears, ClearsOne, ScalesByTheSquare, GivesNan, ClearsTooEarly)


@pytest.fixture
def on_ascend(monkeypatch):
    """`on_ascend(kernels, switch)`: as on a device whose kernels in place are these."""
    def device(special, switch=None):
        monkeypatch.setattr(probe, "InPlace", special)
        monkeypatch.setattr(probe.ms, "get_context", lambda _: "Ascend")
        monkeypatch.delenv(probe.SWITCH, raising=False)
        if switch is not None:
            monkeypatch.setenv(probe.SWITCH, switch)
        probe.choice.cache_clear()

    yield device
    probe.choice.cache_clear()


@pytest.mark.parametrize("special", [Portable, LikePortable])
def test_kernels_that_do_the_same_pass(special):
    assert probe.largest_difference(special(), SIZES) == 0


@pytest.mark.parametrize("special", WRONG)
def test_kernels_that_do_not_are_found(special):
    assert probe.largest_difference(special(), SIZES) > 0.1


def test_where_everything_is_0_nothing_is_proved(monkeypatch):
    """As in a dry run."""
    monkeypatch.setattr(probe.np, "allclose", lambda got, wanted: not got.any() and not wanted.any())
    with pytest.raises(RuntimeError, match=r"^the portable kernels gave wrong results"):
        probe.largest_difference(Portable(), SIZES)


def test_kernels_that_pass_are_taken_without_a_word(on_ascend):
    on_ascend(LikePortable)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(probe.kernels()) is LikePortable
        assert type(probe.kernels(in_buffers=False)) is Portable  # copies, on any device


@pytest.mark.parametrize("special", [InPlace, NeverClears])
def test_the_portable_ones_run_where_the_test_fails_and_one_warning_says_what_that_costs(on_ascend, special):
    """The CPU has no kernels in place: an error is a failure as a wrong result is."""
    on_ascend(special)
    with pytest.warns(UserWarning, match=r"^the kernels that work in place failed.*4 bytes per parameter") as seen:
        assert [type(probe.kernels()) for _ in range(3)] == [Portable] * 3
    assert len([one for one in seen if "work in place failed" in str(one.message)]) == 1


@pytest.mark.parametrize(("switch", "chosen"), [("1", NeverClears), ("0", Portable)])
def test_the_choice_can_be_forced(on_ascend, switch, chosen):
    on_ascend(NeverClears, switch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(probe.kernels()) is chosen


def test_another_choice_is_an_error(on_ascend):
    on_ascend(NeverClears, "true")
    with pytest.raises(ValueError, match=r"^MS_ACCUM_IN_PLACE in the environment is 'true', expected 0 or 1$"):
        probe.kernels()


def test_elsewhere_the_portable_ones_run_without_a_test(monkeypatch):
    monkeypatch.setattr(probe, "largest_difference", lambda *_: pytest.fail("was called"))
    accumulator = Accumulator(sgd(MLP()), 2, reduction="sum")
    assert type(accumulator.window.of_buffers) is type(accumulator.window.kernels) is Portable

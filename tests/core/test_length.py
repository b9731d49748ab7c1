"""When a window closes, for each form of accumulate_step, on the device and on the host; wrong schedules."""
import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, ops
from support import reference
from support.modes import compiled

from ms_accum import by_epoch, until_weight
from ms_accum.core.length import WindowLength

pytestmark = pytest.mark.core


# Each with its lengths after these numbers of updates.
UPDATES = [0, 1, 2, 3, 4, 1500]
LENGTHS = [
    (np.int64(4), [4, 4, 4, 4, 4, 4]),
    ({3: 1, 0: 2, 1: 7}, [2, 7, 7, 1, 1, 1]),
    (until_weight(9, at_most=3), [3, 3, 3, 3, 3, 3]),
]


@pytest.fixture(scope="module")
def windows():
    return [WindowLength(accumulate_step) for accumulate_step, _ in LENGTHS]


def test_lengths(mode, windows):
    """All forms in one graph."""
    def lengths(update_step):
        got = ()
        for window in windows:
            got = (*got, window.length(update_step) + 0 * update_step)
        return got

    lengths = compiled(lengths, mode)
    got = [lengths(Tensor(update, ms.int32)) for update in UPDATES]
    assert [[int(length) for length in column] for column in zip(*got)] == [expected for _, expected in LENGTHS]
    assert [[w.host_length(update) for update in UPDATES] for w in windows] == [expected for _, expected in LENGTHS]


def test_descriptions(windows):
    assert [w.description for w in windows] == ["4", "{0: 2, 1: 7, 3: 1}", "until_weight(9, at_most=3)"]
    assert [WindowLength(form).is_one for form in (1, {0: 1}, {0: 1, 2: 2}, 2)] == [True, True, False, False]


@pytest.mark.parametrize("budget", [0.7, 1.4, 2.1])
def test_budgets_are_compared_in_float32_on_the_host_too(budget):
    """Three times 0.7, added up in float32, do or do not reach 2.1; in float64 it is the other way round."""
    window, weight = WindowLength(until_weight(budget, at_most=5)), Parameter(Tensor(0.0), name="weight")
    for held in range(1, 5):
        ops.assign_add(weight, 0.7)
        full = held >= {0.7: 1, 1.4: 2, 2.1: 3}[budget]
        assert bool(window.is_full(Tensor(held), Tensor(0), weight)) == full
        assert window.missing(held, 0, float(weight)) == 1 - full
    ops.assign(weight, 0.1)
    assert window.is_full(Tensor(5), Tensor(0), weight)  # at_most
    assert window.missing(5, 0, float(weight)) == 0
    assert (window.missing(0, 3), WindowLength({0: 2, 3: 4}).missing(0, 3)) == (1, 4)
    assert (window.constant, WindowLength(3).constant, WindowLength({0: 2, 3: 4}).constant) == (1, 3, None)


@pytest.mark.parametrize(("error", "message", "function", "arguments"), [
    (TypeError, r"a key of accumulate_step is 1\.0", WindowLength, ({0: 1, 1.0: 2.0, 2: 2},)),
    (ValueError, r"a key of accumulate_step is -1, expected an int >= 0; give an int", WindowLength, ({0: 1, -1: 2},)),
    (ValueError, r"accumulate_step is \{1: 2\}, expected a dict that holds 0", WindowLength, ({1: 2},)),
    (TypeError, r"accumulate_step\[2\] is 1\.5", WindowLength, ({0: 1, 2: 1.5},)),
    (ValueError, r"accumulate_step is 2147483648, expected at most 2147483647", WindowLength, (2**31,)),
    (TypeError, r"accumulate_step is <function .* of type function, expected an int", WindowLength, (until_weight,)),
    (TypeError, r"schedule is of type int, expected a dict \{epoch: n\}", by_epoch, (4, 10)),
    (ValueError, r"schedule is \{1: 4\}, expected a dict that holds 0; give .*\{epoch: n\}", by_epoch, ({1: 4}, 10)),
    (ValueError, "microbatches is 0, expected an int >= 1; give the microbatches of an epoch", by_epoch, ({0: 4}, 0)),
    (ValueError, "budget is 0, expected a finite number > 0; give a weight", until_weight, (0,)),
    (ValueError, "at_most is 0, expected an int >= 1; give the most microbatches", until_weight, (4096, 0)),
])
def test_bad_schedules_and_budgets_are_refused(error, message, function, arguments):
    with pytest.raises(error, match=message):
        function(*arguments)


@given(st.dictionaries(st.integers(1, 7), st.integers(1, 9), max_size=3), st.integers(1, 9), st.integers(1, 12))
def test_a_schedule_of_epochs(later, first, microbatches):
    """Simulated: in every epoch all windows but the flushed one have the epoch's length."""
    schedule = {**later, 0: first}
    by_update, update_step = by_epoch(schedule, microbatches), 0
    for epoch in range(9):
        length, left = schedule[max(start for start in schedule if start <= epoch)], microbatches
        while left:
            assert reference.window_length(by_update, update_step) == length, (epoch, update_step)
            left -= min(length, left)
            update_step += 1
    assert update_step > max(by_update)

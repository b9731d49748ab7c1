"""Window: when a window closes, for each form of accumulate_step; wrong integers are refused in test_accumulator.py too."""
import functools

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import compiled
from mindspore import Tensor, ops

from ms_accum import by_epoch
from ms_accum.window import Window


def by_branch(update_step):
    if update_step < 2:
        return 3
    return 5


def by_ops(update_step):
    return ops.minimum(update_step + 1, 4)


def to_float(update_step):
    return update_step * 0.5 + 1.5


def to_zero(update_step):
    return update_step


def falling(update_step):
    return 4 - update_step


def late(update_step):
    if update_step > 20000:
        return -1
    return 2


def dipping(update_step):
    return ops.minimum(ops.abs(update_step - 777), 8)


def to_int64(update_step):
    return update_step.astype(ms.int64) * 4 + 1 - ops.minimum(update_step, 1)


def dipping_unseen(update_step):
    return ops.minimum(ops.abs(update_step - 1500), 8) - 3


def branching_unseen(update_step):
    if update_step == 1500:
        return -3
    return 5


def to_vector(update_step):
    return ops.stack([update_step + 1, update_step + 2])


@pytest.mark.parametrize(("accumulate_step", "expected"), [
    (4, [4, 4, 4, 4, 4]),
    (np.int64(4), [4, 4, 4, 4, 4]),
    ({0: 2}, [2, 2, 2, 2, 2]),
    ({3: 1, 0: 2, 1: 7}, [2, 7, 7, 1, 1]),
    (by_branch, [3, 3, 5, 5, 5]),
    (by_ops, [1, 2, 3, 4, 4]),
    (functools.partial(ops.add, 2), [2, 3, 4, 5, 6]),
], ids=["int", "numpy", "dict of one", "dict", "branch", "ops", "partial"])
def test_length(mode, accumulate_step, expected):
    window = Window(accumulate_step)

    def length(update_step):
        return window.length(update_step) + 0 * update_step

    length = compiled(length, mode)
    assert [int(length(Tensor(u, ms.int32))) for u in range(5)] == expected


@pytest.mark.parametrize(("error", "message", "accumulate_step"), [
    (TypeError, r"a key of accumulate_step is '0' of type str", {"0": 2}),
    (TypeError, r"a key of accumulate_step is 1\.0", {0: 1, 1.0: 2.0, 2: 2}),
    (ValueError, r"accumulate_step has the key -1, but updates are counted from 0", {0: 1, -1: 2}),
    (TypeError, r"accumulate_step\[2\] is 1\.5", {0: 1, 2: 1.5}),
    (ValueError, r"accumulate_step\[2\] is 0, but a window holds at least 1", {0: 1, 2: 0}),
    (TypeError, r"accumulate_step='to_float' at update 0 is 1\.5 of type float", to_float),
    (ValueError, r"accumulate_step='to_zero' at update 0 is 0", to_zero),
    (ValueError, r"'falling' at update 4 is 0, but a window holds .* return ops\.maximum\(\.\.\., 1\)", falling),
    (ValueError, r"'late' at update 32768 is -1, but", late),
    (ValueError, r"'dipping' at update 777 is 0, but", dipping),
    (ValueError, r"'to_int64' at update 536870912 is 2147483648, expected at most 2147483647", to_int64),
    (TypeError, r"accumulate_step='to_vector' returned a Tensor of shape \(2,\)", to_vector),
    (TypeError, r"accumulate_step='<lambda>' cannot be compiled in graph mode \(.*define it with `def`",
     (lambda update_step: 0, lambda u: 1)[1]),
])
def test_bad_schedules_are_refused_by_the_host(error, message, accumulate_step):
    with pytest.raises(error, match=message):
        Window(accumulate_step)


@pytest.mark.parametrize("schedule", [dipping_unseen, branching_unseen])
def test_a_length_below_1_that_was_not_seen_counts_as_1(mode, schedule):
    """Control: the function itself."""
    window = Window(schedule)

    def length(update_step):
        return window.length(update_step) + 0 * update_step

    length = compiled(length, mode)
    at = Tensor(1500, ms.int32)
    assert (int(schedule(at)), int(length(at)), int(length(Tensor(1, ms.int32)))) == (-3, 1, 5)


@pytest.mark.parametrize(("schedule", "microbatches"), [({0: 4}, 10), ({0: 1, 2: 4, 3: 3}, 10), ({0: 8, 1: 1}, 3), ({0: 2, 5: 7}, 1)])
def test_a_schedule_of_epochs(schedule, microbatches):
    """Simulated: in every epoch all windows but the flushed one have the epoch's length."""
    by_update, update_step = by_epoch(schedule, microbatches), 0
    for epoch in range(8):
        length, left = schedule[max(start for start in schedule if start <= epoch)], microbatches
        while left:
            assert reference.window_length(by_update, update_step) == length, (epoch, update_step)
            left -= min(length, left)
            update_step += 1
    assert update_step > max(by_update)


def test_a_schedule_of_epochs_is_checked():
    with pytest.raises(TypeError, match=r"schedule is of type int, expected a dict \{epoch: n\}"):
        by_epoch(4, 10)
    with pytest.raises(ValueError, match=r"schedule is \{1: 4\}, which says nothing about epoch 0"):
        by_epoch({1: 4}, 10)
    with pytest.raises(ValueError, match="schedule has the key -1, but epochs are counted from 0"):
        by_epoch({0: 4, -1: 2}, 10)
    with pytest.raises(ValueError, match="microbatches is 0, but a window holds at least 1"):
        by_epoch({0: 4}, 0)


def by_ops_too(update_step):
    return ops.minimum(4, 1 + update_step)


def later(update_step):
    return ops.where(update_step < 1000, 1, 4)


def test_functions_are_told_apart_by_their_lengths():
    """Not by their names: those of two lambdas or partials are the same."""
    assert Window(by_ops).describe() == Window(by_ops_too).describe()
    partials = functools.partial(ops.add, 2), functools.partial(ops.add, 3)
    descriptions = [Window(schedule).describe() for schedule in (by_ops, by_branch, later, 1, {0: 1, 1000: 4}, *partials)]
    assert len(set(descriptions)) == len(descriptions)
    assert descriptions[2:5] == [f"a function with lengths {(1,) * 11 + (4,) * 7}", "1", "{0: 1, 1000: 4}"]

"""Window: when a window closes, for each form of accumulate_step; wrong integers are refused in test_arguments.py too."""
import functools

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, compiled, mean_loss, tensors
from following import op_by_op
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Tensor, nn, ops

from ms_accum import Accumulator, TrainOneStepCell, by_epoch, make_train_step, until_weight
from ms_accum.window import Window


def by_branch(update_step):
    if update_step < 2:
        return 3
    return 5


def by_ops(update_step):
    return ops.minimum(update_step + 1, 4)


def dipping_unseen(update_step):
    return ops.minimum(ops.abs(update_step - 1500), 8) - 3


def branching_unseen(update_step):
    if update_step == 1500:
        return -3
    return 5


# Each with its lengths after these numbers of updates. Where a function returns less than 1, the length is 1.
UPDATES = [0, 1, 2, 3, 4, 1500]
LENGTHS = [
    (4, [4, 4, 4, 4, 4, 4]),
    (np.int64(4), [4, 4, 4, 4, 4, 4]),
    ({0: 2}, [2, 2, 2, 2, 2, 2]),
    ({3: 1, 0: 2, 1: 7}, [2, 7, 7, 1, 1, 1]),
    (by_branch, [3, 3, 5, 5, 5, 5]),
    (by_ops, [1, 2, 3, 4, 4, 4]),
    (functools.partial(ops.add, 2), [2, 3, 4, 5, 6, 1502]),
    (dipping_unseen, [5, 5, 5, 5, 5, 1]),
    (branching_unseen, [5, 5, 5, 5, 5, 1]),
]


@pytest.fixture(scope="module")
def windows():
    return [Window(accumulate_step) for accumulate_step, _ in LENGTHS]


def test_lengths(mode, windows):
    """All forms in one graph. Control: without the lower bound, two of the functions return -3."""

    def lengths(update_step):
        got = ()
        for window in windows:
            got = (*got, window.length(update_step) + 0 * update_step)
        return got

    lengths = compiled(lengths, mode)
    got = [lengths(Tensor(update, ms.int32)) for update in UPDATES]
    assert [[int(length) for length in column] for column in zip(*got)] == [expected for _, expected in LENGTHS]
    at = Tensor(1500, ms.int32)
    assert (int(dipping_unseen(at)), int(branching_unseen(at))) == (-3, -3)


def late(update_step):
    if update_step > 20000:
        return -1
    return 2


def to_int64(update_step):
    return update_step.astype(ms.int64) * 4 + 1 - ops.minimum(update_step, 1)


def to_vector(update_step):
    return ops.stack([update_step + 1, update_step + 2])


@pytest.mark.parametrize(("error", "message", "accumulate_step"), [
    (TypeError, r"a key of accumulate_step is '0' of type str", {"0": 2}),
    (TypeError, r"a key of accumulate_step is 1\.0", {0: 1, 1.0: 2.0, 2: 2}),
    (ValueError, r"a key of accumulate_step is -1, expected an int >= 0; give an int >= 1, a dict", {0: 1, -1: 2}),
    (TypeError, r"accumulate_step\[2\] is 1\.5", {0: 1, 2: 1.5}),
    (ValueError, r"accumulate_step\[2\] is 0, expected an int >= 1", {0: 1, 2: 0}),
    (TypeError, r"accumulate_step=.*add.* at update 0 is 1\.5 of type float", functools.partial(ops.add, 1.5)),
    (ValueError, r"at update 777 is 0, expected an int >= 1; return .*, e\.g\. ops\.maximum\(\.\.\., 1\)", functools.partial(ops.sub, 777)),
    (ValueError, r"accumulate_step='late' at update 32768 is -1, expected", late),
    (ValueError, r"'to_int64' at update 536870912 is 2147483648, expected at most 2147483647", to_int64),
    (TypeError, r"accumulate_step='to_vector' returned a Tensor of shape \(2,\)", to_vector),
    (TypeError, r"accumulate_step='<lambda>' cannot be compiled in graph mode \(.*define it with `def`",
     (lambda update_step: 0, lambda u: 1)[1]),
])
def test_bad_schedules_are_refused_by_the_host(error, message, accumulate_step):
    with pytest.raises(error, match=message):
        Window(accumulate_step)


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


@pytest.mark.parametrize(("error", "message", "arguments"), [
    (TypeError, r"schedule is of type int, expected a dict \{epoch: n\}", (4, 10)),
    (ValueError, r"schedule is \{1: 4\}, expected a dict that holds 0; give a dict \{epoch: n\}", ({1: 4}, 10)),
    (ValueError, "a key of schedule is -1, expected an int >= 0", ({0: 4, -1: 2}, 10)),
    (ValueError, "microbatches is 0, expected an int >= 1", ({0: 4}, 0)),
])
def test_bad_schedules_of_epochs_are_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        by_epoch(*arguments)


def by_ops_too(update_step):
    return ops.minimum(4, 1 + update_step)


def later(update_step):
    return ops.where(update_step < 1000, 1, 4)


def test_functions_are_told_apart_by_their_lengths(windows):
    """Not by their names: those of two lambdas or partials are the same."""
    described = [window.describe() for window in windows]
    assert described[0] == described[1] == "4"
    assert len(set(described[:7])) == 6  # not those that differ at 1500 alone
    assert Window(by_ops_too).describe() == described[5]
    assert Window(functools.partial(ops.add, 3)).describe() not in described
    assert Window(later).describe() == f"a function with lengths {(1,) * 11 + (4,) * 7}"
    assert described[3] == "{0: 2, 1: 7, 3: 1}"


# --- budgets ------------------------------------------------------------------------------------------------------------


def unmasked(x, y):
    return (y > 0).sum()


@pytest.mark.parametrize("weight_fn", [None, unmasked])
@pytest.mark.parametrize("driver", ["split", "fused", "cell"])
def test_a_budget_closes_windows(driver, weight_fn, mode):
    """Where the weight reaches it, and after `at_most` microbatches; the control is the length alone, which closes elsewhere."""
    network, budget, at_most = MLP(), 11 if weight_fn is None else 7, 3
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), until_weight(budget, at_most), reduction="mean")
    if driver == "cell":
        step = TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), accumulator, weight_fn=weight_fn)
    else:
        step = make_train_step(mean_loss(network), accumulator, weight_fn=weight_fn, strategy=driver, micro_size=2)
    ends, expected, weights, held = [], [], [], 0
    for i, (x, y) in enumerate(batches([5, 9, 5, 5, 5, 9, 5, 5, 9, 5], seed=3)):
        updates = int(accumulator.update_step)
        step(*tensors(x, y))
        weights.append(len(x) if weight_fn is None else int((y > 0).sum()))
        held += 1
        if sum(weights[-held:]) >= budget or held == at_most:
            expected.append((i, sum(weights[-held:])))
            held = 0
        if int(accumulator.update_step) > updates:
            ends.append((i, float(accumulator.window_weight)))
    assert ends == expected
    assert ends != [(i, sum(weights[i - 2:i + 1])) for i in (2, 5, 8)]
    assert accumulator.window.describe() == f"until_weight({budget}, at_most=3)"


@pytest.mark.parametrize(("error", "message", "arguments"), [
    (ValueError, "budget is 0, expected a finite number > 0; give a weight", (0,)),
    (ValueError, "budget is inf, expected a finite number > 0", (float("inf"),)),
    (TypeError, "budget is '4096' of type str", ("4096",)),
    (ValueError, "at_most is 0, expected an int >= 1", (4096, 0)),
    (TypeError, "at_most is None of type NoneType", (4096, None)),
])
def test_bad_budgets_are_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        until_weight(*arguments)


@pytest.mark.parametrize("driver", ["split", "fused", "ahead"])
@pytest.mark.parametrize("budget", [0.7, 1.4, 2.1])
def test_budgets_are_compared_as_the_device_does(budget, driver):
    """In float32: 0.7 reaches a budget of 0.7, as three times 0.7, added up, do or do not reach 2.1."""
    network, closed = MLP(), []

    def forward_fn(x, y):
        return network(x).mean(), network(x).mean()

    def weigh(x, y):
        return y.sum() * 0.0 + 0.7, y.sum() * 0.0 + 1.0

    step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), 0.1), until_weight(budget), weight_fn=weigh, losses=2,
                           strategy="fused" if driver == "fused" else "split")
    with op_by_op():
        for _ in step.epoch([tensors(x, y) for x, y in batches([2] * 7)], lookahead=driver == "ahead"):
            closed.append(bool(step.updated))
    expected, held = [], np.float32(0)
    for _ in range(7):
        held += np.float32(0.7)
        expected.append(bool(held >= np.float32(budget)))
        held = np.float32(0) if expected[-1] else held
    assert closed[:6] == expected[:6]
    assert sum(expected) == {0.7: 7, 1.4: 3, 2.1: 2}[budget]


@pytest.mark.parametrize("stages", [3, 60])
def test_many_stages_are_looked_up(stages, mode):
    """Few are compared one by one, many in a table; both are the last one that has begun."""
    window = Window({0: 5, **{7 * i: i for i in range(1, stages)}})

    def length(update_step):
        return ops.ones_like(update_step) * window.length(update_step)

    length = compiled(length, mode)
    for update in (0, 1, 6, 7, 8, 13, 14, 7 * stages - 8, 7 * stages - 7, 10**6):
        assert int(length(Tensor(update, ms.int32))) == window.host_length(update) == (min(update // 7, stages - 1) or 5)


def test_a_function_in_the_place_of_a_budget_is_refused():
    with pytest.raises(TypeError, match=r"is until_weight itself, expected what it returns; give until_weight\(65_536\)"):
        Window(until_weight)


def test_a_budget_without_weights_is_refused():
    optimizer = nn.SGD(MLP().trainable_params(), 0.1)
    with pytest.raises(ValueError, match="got until_weight with reduction='sum', which does not add up weights"):
        Accumulator(optimizer, until_weight(10))

"""The learning rate of a step, and what is an error of it. Sentence 6.

What `Rates` finds and sets: core/test_optimizers.py. That a rate which is set trains as in plain MindSpore:
test_differential.py draws when, groups and optimizers.
"""
import pytest
from mindspore.experimental import optim

from ms_accum import make_train_step
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("uncompiled")]

DATA = [tensors(x, y) for x, y in batches([6] * 4)]


def made():
    network = MLP()
    weights = network.trainable_params()
    optimizer = optim.SGD([{"params": weights[:1], "lr": 0.5}, {"params": weights[1:]}], lr=0.25)
    return optimizer, make_train_step(mean_loss(network), optimizer, 2)


def test_what_a_script_puts_into_param_groups_is_an_error_that_names_learning_rate():
    """At the next epoch and flush. Control: a rate that is set there by `learning_rate`."""
    optimizer, step = made()
    step.learning_rate = 0.2
    assert len(list(step.epoch(DATA))) == 4
    optimizer.param_groups[0]["weight_decay"] = 0.5
    for refused in (lambda: next(step.epoch(DATA)), step.flush):
        with pytest.raises(RuntimeError, match=r"param_groups was given another weight_decay, .*step\.learning_rate"):
            refused()


@pytest.mark.parametrize(("rate", "error", "message"), [
    (-1.0, ValueError, r"learning_rate is -1\.0, expected a finite number >= 0"),
    (float("nan"), ValueError, "expected a finite number"), ("0.1", TypeError, "'0.1' of type str, expected a finite"),
    ((0.1, 0.2, 0.3), ValueError, "is 3 numbers, expected one for each of the 2 rates of SGD, or one number for all"),
    ((0.1, None), TypeError, "learning_rate is None")])
def test_what_is_no_rate_is_an_error_before_anything_is_set(rate, error, message):
    """Controls: one number for all, and one for each group."""
    _, step = made()
    with pytest.raises(error, match=message):
        step.learning_rate = rate
    assert step.learning_rate == (0.5, 0.25)
    for given, expected in ((0.125, (0.125, 0.125)), ((0.75, 0.25), (0.75, 0.25))):
        step.learning_rate = given
        assert step.learning_rate == expected

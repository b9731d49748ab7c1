"""Training runs drawn as a whole, with ms_accum and with plain MindSpore on the undivided batches."""
import random

import pytest
from differential.cases import DRIVERS, LEVELS, compose
from differential.follow import follow

FAST = 20


def drawn(number, **fixed):
    """The Case of a number."""
    return compose(random.Random(number).choice, **fixed)


def strata():
    """20 Cases: every driver twice, every amp level twice, the rest as drawn."""
    levels = [*LEVELS, *LEVELS, *LEVELS]
    return [drawn(i, driver=DRIVERS[i % len(DRIVERS)], level=levels[i]) for i in range(FAST)]


@pytest.mark.parametrize("case", strata(), ids=lambda case: f"{case.driver}-{case.level}")
def test_each_driver_and_level(case, tmp_path):
    print(case)
    follow(case, tmp_path)

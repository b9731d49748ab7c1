"""`ms-accum check`: its answer, its status, and its errors."""
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, int32, nn, ops

from ms_accum import __main__ as cli

HERE = __name__
network = nn.Dense(6, 3)
batch = Tensor(np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)), Tensor(np.arange(8) % 3, int32)
number = 3


def mean(x, y):
    return ops.cross_entropy(network(x), y)


def total(x, y):
    return ops.cross_entropy(network(x), y, reduction="sum")


def noisy(x, y):
    return ops.cross_entropy(ops.dropout(network(x), 0.5, True), y)


def fails(x, y):
    raise RuntimeError("as it does")


exact, inexact, unclear, failing = (partial(tuple, (loss, network, batch)) for loss in (mean, total, noisy, fails))
weighted = partial(tuple, (mean, network, batch, lambda x, y: 1.0))
returning = partial(tuple, (lambda x, y: (mean(x, y), len(x)), network, batch))
short = partial(tuple, (mean, network))


@pytest.mark.parametrize(("arguments", "status", "verdict", "said"), [
    ("exact", 0, True, "Accumulation is exact for this network, loss and batch (8 samples in 4 pieces)."),
    ("weighted --pieces 3", 1, False, ""), ("returning --has-weight", 0, True, ""),
    ("inexact", 1, False, "total (function): wrong normalisation"),
    ("unclear", 2, None, "Cannot tell whether accumulation is exact for this network")])
def test_the_command_answers_by_its_status_and_a_report(capsys, arguments, status, verdict, said):
    assert cli.main(["check", *f"{HERE}:{arguments} --json report.json".split()]) == status
    out, err = capsys.readouterr()
    assert (said in out, err) == (True, "")
    assert json.loads(Path("report.json").read_text())["ok"] is verdict


IMPORT = "argument MODULE:FUNCTION: cannot import {}, expected e.g. train:make_case in the current folder: {}"


@pytest.mark.parametrize(("arguments", "message"), [
    (f"{HERE}:nothing", IMPORT.format(f"{HERE}:nothing", f"AttributeError: module '{HERE}' has no attribute")),
    (f"{HERE}:number", IMPORT.format(f"{HERE}:number", "TypeError: it is of type int, expected a function")),
    ("broken_module:f", IMPORT.format("broken_module:f", "ZeroDivisionError: division by zero")),
    (f"{HERE}:short", f"{HERE}:short returned 2 values, expected (forward_fn, network, batch)"),
    (f"{HERE}:failing", f"{HERE}:failing: RuntimeError: as it does"),
    ("json:loads --pieces 1", "argument --pieces: expected a whole number from 2 to 2147483647, got '1'"),
    ("", "the following arguments are required: MODULE:FUNCTION")])
def test_an_error_is_one_line(capsys, arguments, message):
    """With a traceback in front of it where the error is in the user's code."""
    Path("broken_module.py").write_text("1 / 0")
    assert cli.main(["check", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(f"ms-accum check: error: {message}")
    of_the_user = arguments.endswith((":failing", "broken_module:f"))
    assert (err.startswith("Traceback"), len(err.splitlines()) > 1) == (of_the_user, of_the_user)

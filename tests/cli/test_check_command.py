"""`ms-accum check`: its answer, its status, and what it refuses."""
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, int32, nn, ops

from ms_accum import __main__ as cli

HERE = __name__


# --- what the command imports by name ---------------------------------------------------------------------------------

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
short, single = partial(tuple, (mean, network)), partial(tuple, (mean, network, 3))


def raising():
    return 1 / 0


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def check(capsys):
    """Run `ms-accum check` in this process: (status, stdout, stderr)."""
    def run(*arguments):
        return cli.main(["check", *arguments]), *capsys.readouterr()
    return run


def test_the_command_answers_by_its_status(check):
    status, out, err = check(f"{HERE}:exact")
    assert (status, err) == (0, "")
    assert out.startswith("Accumulation is exact for this network, loss and batch (8 samples in 4 pieces).")
    status, out, err = check(f"{HERE}:inexact", "--pieces", "3", "--json", "report.json")
    assert (status, err) == (1, "")
    assert "NOT exact" in out
    assert "total (function): wrong normalisation" in out
    report = json.loads(Path("report.json").read_text())
    assert (report["ok"], report["pieces"]) == (False, 3)
    assert report["causes"][0].keys() == {"layer", "type", "what", "remedy"}
    assert report["max_relative_difference"] == max(report["per_parameter"].values())
    status, out, err = check(f"{HERE}:unclear", "--json", "report.json")
    assert (status, err, json.loads(Path("report.json").read_text())["ok"]) == (2, "", None)
    assert out.startswith("Cannot tell whether accumulation is exact for this network")
    assert [check(f"{HERE}:weighted", "--pieces", pieces)[0] for pieces in ("4", "3")] == [0, 1]
    assert [check(f"{HERE}:returning", *option)[0] for option in (["--has-weight"], [])] == [0, 2]


IMPORT = "argument MODULE:FUNCTION: cannot import {}, expected e.g. train:make_case in the current folder: {}"
NO_MODULE = IMPORT.format("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'")


@pytest.mark.parametrize(("arguments", "message"), [
    (f"{HERE}:nothing", IMPORT.format(f"{HERE}:nothing", f"AttributeError: module '{HERE}' has no attribute")),
    (f"{HERE}:number", IMPORT.format(f"{HERE}:number", "TypeError: it is of type int, expected a function")),
    ("broken_module:f", IMPORT.format("broken_module:f", "ZeroDivisionError: division by zero")),
    ("no_such_module:f", NO_MODULE),
    (f"{HERE}:short", f"{HERE}:short returned 2 values, expected (forward_fn, network, batch)"),
    (f"{HERE}:single", f"{HERE}:single: TypeError: batch is of type int, expected a tuple"),
    (f"{HERE}:raising", f"{HERE}:raising: ZeroDivisionError: division by zero"),
    (f"{HERE}:failing", f"{HERE}:failing: RuntimeError: as it does"),
    ("json:loads --pieces 1", "argument --pieces: expected a whole number from 2, got '1'"),
    ("", "the following arguments are required: MODULE:FUNCTION")])
def test_the_command_refuses_in_one_line(check, arguments, message):
    """With a traceback in front of it where the error is in the user's code."""
    Path("broken_module.py").write_text("1 / 0")
    status, out, err = check(*arguments.split())
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"ms-accum check: error: {message}")
    of_the_user = arguments.endswith((":raising", ":failing", "broken_module:f"))
    assert err.startswith("Traceback") == of_the_user
    assert len(err.splitlines()) == 1 or of_the_user

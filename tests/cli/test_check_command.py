"""`ms-accum check`: its answer, its status, and what it refuses."""
import json
from pathlib import Path

import pytest

from ms_accum.cli import main as cli


@pytest.fixture
def check(capsys):
    """Run `ms-accum check` in this process: (status, stdout, stderr)."""
    def run(*arguments):
        return cli.main(["check", *arguments]), *capsys.readouterr()
    return run


def test_the_command_answers_by_its_status(check):
    status, out, err = check("check_cases:exact")
    assert (status, err) == (0, "")
    assert out.startswith("Accumulation is exact for this network, loss and batch (8 samples in 4 pieces).")
    status, out, err = check("check_cases:inexact", "--pieces", "3", "--json", "report.json")
    assert (status, err) == (1, "")
    assert "NOT exact" in out
    assert "total (function): wrong normalisation" in out
    report = json.loads(Path("report.json").read_text())
    assert (report["ok"], report["pieces"]) == (False, 3)
    assert report["causes"][0].keys() == {"layer", "type", "what", "remedy"}
    assert report["max_relative_difference"] == max(report["per_parameter"].values())
    status, out, err = check("check_cases:unclear", "--json", "report.json")
    assert (status, err, json.loads(Path("report.json").read_text())["ok"]) == (2, "", None)
    assert out.startswith("Cannot tell whether accumulation is exact for this network")
    assert [check("check_cases:weighted", "--pieces", pieces)[0] for pieces in ("4", "3")] == [0, 1]


IMPORT = "argument MODULE:FUNCTION: cannot import {}, expected e.g. train:make_case in the current folder: {}"


@pytest.mark.parametrize(("arguments", "message"), [
    (["check_cases:nothing"],
     IMPORT.format("check_cases:nothing", "AttributeError: module 'check_cases' has no attribute 'nothing'")),
    (["check_cases:number"], IMPORT.format("check_cases:number", "TypeError: it is of type int, expected a function")),
    (["broken_module:f"], IMPORT.format("broken_module:f", "ZeroDivisionError: division by zero")),
    (["no_such_module:f"], IMPORT.format("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'")),
    (["train-it:f"], IMPORT.format("train-it:f", "ValueError: invalid format: 'train-it:f'")),
    (["json"], IMPORT.format("json", "TypeError: it is of type module, expected a function")),
    (["check_cases:short"], "check_cases:short returned 2 values, expected (forward_fn, network, batch)"),
    (["check_cases:single"], "check_cases:single: TypeError: batch is of type int, expected a tuple"),
    (["check_cases:raising"], "check_cases:raising: ZeroDivisionError: division by zero"),
    (["check_cases:failing"], "check_cases:failing: RuntimeError: as it does"),
    (["json:loads", "--pieces", "1"], "argument --pieces: expected a whole number from 2, got '1'"),
    (["json:loads", "--json", "no/such/folder.json"],
     "argument --json: cannot write no/such/folder.json (No such file or directory)"),
    ([], "the following arguments are required: MODULE:FUNCTION")])
def test_the_command_refuses_in_one_line(check, arguments, message):
    """With a traceback in front of it where the error is in the user's code."""
    Path("broken_module.py").write_text("1 / 0")
    status, out, err = check(*arguments)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"ms-accum check: error: {message}")
    of_the_user = arguments and arguments[0].endswith((":raising", ":failing", "broken_module:f"))
    assert err.startswith("Traceback") == bool(of_the_user)
    assert len(err.splitlines()) == 1 or of_the_user

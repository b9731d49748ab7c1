"""The command `ms-accum`: help, a closed pipe, interruptions."""
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ms_accum
from ms_accum import __main__ as cli
from ms_accum.cli import files

ENDLESS = """\
import mindspore as ms
from mindspore import Tensor


@ms.jit
def doubled(x):
    return x * 2


def make_case():
    while True:
        doubled(Tensor(1.0)).asnumpy()
        print("ran a graph", flush=True)
"""


@pytest.mark.parametrize(("arguments", "status", "out", "err"), [
    ([], 2, "", "ms-accum: error: the following arguments are required: COMMAND\n"),
    (["--version"], 0, f"ms_accum {ms_accum.__version__}\n", ""),
    (["--help"], 0, "usage: ms-accum .*check .*plan .*selftest .*", "")])
def test_help_version_and_no_command(capsys, arguments, status, out, err):
    assert cli.main(arguments) == status
    captured = capsys.readouterr()
    assert re.fullmatch(out, captured.out, re.DOTALL)
    assert captured.err == err


def test_a_file_is_written_whole_or_not_at_all(monkeypatch):
    path = Path("file")
    files.write_json(path, {"before": float("nan")})
    monkeypatch.setattr(os, "replace", lambda part, whole: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        files.write_json(path, {"after": 1.0})
    assert path.read_text() == '{\n  "before": null\n}\n'
    assert os.listdir() == ["file"]


@pytest.mark.parametrize("arguments", [("--version",), ("check", "loud:none")], ids=" ".join)
def test_a_closed_pipe_ends_the_command_without_a_word(arguments, monkeypatch, capsys):
    """Also if it is noticed in a user's code."""
    Path("loud.py").write_text('for _ in range(10_000):\n    print("what a user\'s code prints")\n', encoding="utf-8")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(arguments) == 141
    assert [line for line in capsys.readouterr().err.splitlines() if "[WARNING]" not in line] == []


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_one_line_and_status_130(stop, capsys):
    Path(f"stopped{stop}.py").write_text(f"import signal\nsignal.raise_signal({stop:d})\n", encoding="utf-8")
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert cli.main(["check", f"stopped{stop}:make_case", "--json", "run.json"]) == 130
    assert capsys.readouterr().err == "ms-accum: interrupted\n"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert not Path("run.json").exists()


@pytest.mark.slow
def test_ctrl_c_stops_a_process_whose_handler_mindspore_has_replaced():
    """After a graph has run, MindSpore's own handler is in place, which turns SIGINT into SIGTERM."""
    Path("endless.py").write_text(ENDLESS, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(Path(ms_accum.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-m", "ms_accum", "check", "endless:make_case"], env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        for _ in range(2):
            assert running.stdout.readline() == "ran a graph\n"
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=60)
    assert running.returncode == 130
    # MindSpore may add a line of its own, if it was just making a Tensor.
    assert [line for line in error.splitlines() if "[WARNING]" not in line] == ["ms-accum: interrupted"]


def test_a_module_that_ends_the_process_with_a_text_does_so(capsys):
    """As Python does: the text on stderr, and status 1."""
    Path("leaving.py").write_text("import sys\nsys.exit('no data here')\n", encoding="utf-8")
    assert cli.main(["check", "leaving:make_case"]) == 1
    assert capsys.readouterr().err == "no data here\n"

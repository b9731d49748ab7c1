"""The command `ms-accum`: help, a closed pipe, interruptions."""
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.mnist_files import embedded_set, write

import ms_accum
from ms_accum import __main__ as cli
from ms_accum.cli import files
from ms_accum.examples import program

QUICK = ("mnist", "--data", "digits", "--batch-size", "16")


@pytest.fixture(autouse=True)
def _digits(_scratch_folder, uncompiled):
    write(Path("digits"), embedded_set(90, 50))


def process(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(Path(ms_accum.__file__).parents[1])}
    return subprocess.Popen([sys.executable, "-m", "ms_accum", *arguments], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(("arguments", "status", "out", "err"), [
    ([], 2, "", "ms-accum: error: the following arguments are required: COMMAND\n"),
    (["--version"], 0, f"ms_accum {ms_accum.__version__}\n", ""),
    (["--help"], 0, "usage: ms-accum .*mnist .*lm .*check .*plan .*selftest .*", "")])
def test_help_version_and_no_command(capsys, arguments, status, out, err):
    assert cli.main(arguments) == status
    captured = capsys.readouterr()
    assert re.fullmatch(out, captured.out, re.DOTALL)
    assert captured.err == err


def test_a_file_is_written_whole_or_not_at_all():
    def fail(part):
        part.write_text("half")
        raise ZeroDivisionError

    def write(part):
        part.write_text("after")
        assert path.read_text() == "before"

    path = Path("file")
    path.write_text("before")
    with pytest.raises(ZeroDivisionError):
        files.write_file(path, fail)
    assert path.read_text() == "before"
    files.write_file(path, write)
    assert path.read_text() == "after"
    assert sorted(os.listdir()) == ["digits", "file"]


@pytest.mark.parametrize("arguments", [QUICK, ("--version",), ("check", "loud:none")], ids=" ".join)
def test_a_closed_pipe_ends_the_command_without_a_word(arguments, monkeypatch, capsys):
    """Also if it is noticed in a user's code."""
    Path("loud.py").write_text('for _ in range(10_000):\n    print("what a user\'s code prints")\n', encoding="utf-8")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(arguments) == 141
    assert [line for line in capsys.readouterr().err.splitlines() if "[WARNING]" not in line] == []


def test_head_ends_the_process_without_a_word():
    """As in `ms-accum mnist | head -2`: nothing is written when the interpreter exits, either."""
    with process(*QUICK, "--epochs", "100000") as running:
        for _ in range(2):
            assert running.stdout.readline()
        running.stdout.close()
        error = running.stderr.read()
    assert [line for line in error.splitlines() if "[WARNING]" not in line] == []
    assert running.returncode == 141


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_one_line_and_status_130(stop, monkeypatch, capsys):
    monkeypatch.setattr(program, "Report", lambda *_: signal.raise_signal(stop))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert cli.main([*QUICK, "--json", "run.json"]) == 130
    assert capsys.readouterr().err == "ms-accum: interrupted\n"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert sorted(os.listdir()) == ["digits"]


def test_ctrl_c_stops_a_process_whose_handler_mindspore_has_replaced():
    """In epoch 2, MindSpore's own handler is in place, which turns SIGINT into SIGTERM."""
    with process(*QUICK, "--epochs", "100000", "--json", "run.json") as running:
        while not running.stdout.readline().startswith("epoch 2/100000"):
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=60)
    assert running.returncode == 130
    # MindSpore may add a line of its own, if it was just making a Tensor.
    assert [line for line in error.splitlines() if "[WARNING]" not in line] == ["ms-accum: interrupted"]
    assert os.listdir() == ["digits"]


def test_a_module_that_ends_the_process_with_a_text_does_so(capsys):
    """As Python does: the text on stderr, and status 1."""
    Path("leaving.py").write_text("import sys\nsys.exit('no data here')\n", encoding="utf-8")
    assert cli.main(["check", "leaving:make_case"]) == 1
    assert capsys.readouterr().err == "no data here\n"

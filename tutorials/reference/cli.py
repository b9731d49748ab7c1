"""Write tutorials/reference/cli.md from what `ms-accum --help` and its commands print: `python PATH_OF_THIS_FILE`."""
import io
import os
import re
from contextlib import redirect_stdout
from pathlib import Path

from ms_accum.__main__ import main

PAGE = Path(__file__).with_name("cli.md")
INTRODUCTION = """\
# Command line

What `--help` prints of [checks](../guide/check.md), [plans](../guide/batch-size.md) and \
[tests](../guide/selftest.md), without examples.
"""
COMMANDS = "check", "plan", "selftest"
LEFT_OUT = re.compile(r"\nexamples:\n(  .*\n)+|  -h, --help .*\n")


def text():
    """Return the page."""
    os.environ["COLUMNS"] = "100"
    return "".join([INTRODUCTION, *(section(command) for command in COMMANDS)])


def section(command):
    """Return a heading and the help of a command."""
    with redirect_stdout(io.StringIO()) as printed:
        main([command, "--help"])
    return f"\n## ms-accum {command}\n\n```text\n{LEFT_OUT.sub('', printed.getvalue()).rstrip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")

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

The command `ms-accum` [checks](../guide/check.md) whether accumulation is exact for a network, \
[plans](../guide/batch-size.md) a microbatch, and [tests](../guide/selftest.md) \
itself on your device. This page shows what `--help` prints, without its examples.
"""
COMMANDS = "check", "plan", "selftest"
EXAMPLES = re.compile(r"\nexamples:\n(  .*\n)+")


def text():
    """Return the page."""
    os.environ["COLUMNS"] = "100"
    return "".join([INTRODUCTION, *(section(command) for command in COMMANDS)])


def section(command):
    """Return a heading and the help of a command."""
    with redirect_stdout(io.StringIO()) as printed:
        main([command, "--help"])
    return f"\n## ms-accum {command}\n\n```text\n{EXAMPLES.sub('', printed.getvalue()).rstrip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")

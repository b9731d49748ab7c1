"""The command `ms-accum`, and `python -m ms_accum`: it combines the subcommands."""
import sys
from collections.abc import Sequence
from typing import Optional

from .cli import check, plan
from .cli.main import run_command
from .selftest import command as selftest


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run `ms-accum` with `argv` (default: `sys.argv[1:]`) and return the exit status: see `run_command`."""
    return run_command((check, plan, selftest), argv)


if __name__ == "__main__":
    sys.exit(main())

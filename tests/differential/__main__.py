"""`python -m differential FOLDER NAME`: whether a narrow draw finds a defect in the ms_accum of FOLDER. Status 1 if so, 0 if not."""
import sys
import tempfile
from pathlib import Path

import pytest

import ms_accum

from .defects import cases
from .follow import follow


def main(folder, name):
    if not Path(ms_accum.__file__).is_relative_to(folder):
        return f"ms_accum is imported from {ms_accum.__file__}, expected {folder}"
    for case in cases(name):
        print(case, flush=True)
        try:
            follow(case, Path(tempfile.mkdtemp(dir=".")))
        except (AssertionError, pytest.fail.Exception) as found:
            print(f"found: {found}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

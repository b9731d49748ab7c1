"""Pages, docstrings and notebooks: what they hold, and a process that runs their blocks."""
import doctest
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import ms_accum
from ms_accum import batch_size, distributed

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "tutorials"
PATHS = [TUTORIALS / "index.md", TUTORIALS / "changelog.md", *sorted(TUTORIALS.glob("guide/*.md")),
         *sorted(TUTORIALS.glob("reference/*.md"))]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in PATHS}
README = (ROOT / "README.md").read_text(encoding="utf-8")
PUBLIC = {
    f"{door.__name__}.{name}": value for door in (ms_accum, batch_size, distributed)
    for name, value in vars(door).items() if inspect.isclass(value) or inspect.isfunction(value)}
# An exception is documented where it is raised.
EXCEPTIONS = [name for name, value in PUBLIC.items() if inspect.isclass(value) and issubclass(value, Exception)]

# --- blocks -----------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Code, and what it says that it prints."""

    code: str
    printed: str | None = None  # None if nothing is said
    example: bool = False  # whether the figures are an example

    def agrees(self, printed):
        return self.printed is None or comparable(printed, self.example) == comparable(self.printed, self.example)


def comparable(text, example):
    """Printed lines; of an example, without their figures, and without the lines that list parameters."""
    lines = [line.rstrip() for line in text.rstrip("\n").splitlines()]
    if not example:
        return lines
    return [re.sub(r"[\d.]+e[+-]\d\d", "#", line) for line in lines if not line.startswith(("largest", "beyond"))]


_BLOCK = re.compile(
    r"^```python\n(.*?)^```\n(?:\n(It prints(?:, for example)?|输出)\W\n\n```text\n(.*?)^```\n)?",
    re.MULTILINE | re.DOTALL)


def blocks_of(page):
    """The Python blocks of a page, in order."""
    return [Block(code, printed if said else None, said.endswith("example"))
            for code, said, printed in _BLOCK.findall(page)]


def docstring_block(name):
    """The examples of a public name."""
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(PUBLIC[name]))
    assert any(example.want for example in examples), name
    return Block("".join(example.source for example in examples), "".join(example.want for example in examples))


def written(path, blocks):
    """Write blocks as a script, and return its path: graph mode reads the source of functions."""
    path.write_text("".join(f"{block.code}\nended()\n" for block in blocks), encoding="utf-8")
    return path


def run_blocks(scripts):
    """Run scripts of several blocks each in one process.

    Return by script what each block printed, and how many figures it drew.
    """
    paths = [written(Path.cwd() / f"{name}.py", blocks) for name, blocks in scripts.items()]
    command = [sys.executable, Path(__file__).with_name("run_blocks.py"), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "UserWarning: " not in done.stderr, done.stderr  # what one copies warns of nothing
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["unchanged"], "importing ms_accum changes global state"
    assert told["file"] == ms_accum.__file__
    return told["printed"]

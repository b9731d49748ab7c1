"""The shape of the package: rooms import downwards only, no private names, and the way of a gradient is short."""
import ast
import re
from pathlib import Path

import pytest
from mindspore import nn
from support.processes import run_python

from ms_accum import Accumulator
from ms_accum.selftest.networks import MLP

pytestmark = pytest.mark.core

PACKAGE = Path(__file__).parents[1] / "ms_accum"
# From the ground up. Rooms of one floor do not know each other; those of `DOORS` may import the public names.
FLOORS = (("mindspore_api",), ("tensors",), ("arguments", "runtime"), ("distributed",), ("core",), ("steps",),
          ("model", "checkpoint", "batch_size", "check"), ("cli",), ("selftest",), ("__init__", "__main__"))
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
DOORS = ("cli", "selftest")


def imports(name, source):
    """Yield the places in the package, and the names, that a module imports when it runs."""
    tree = ast.parse(source)
    typing = {id(inside) for node in ast.walk(tree) if isinstance(node, ast.If)
              and "TYPE_CHECKING" in ast.dump(node.test) for inside in ast.walk(node)}
    package = ("ms_accum", *name.split("/")[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in typing:
            base = package[:len(package) + 1 - node.level] if node.level else ()
            place = (*base, *(node.module.split(".") if node.module else ()))
            if place[0] == "ms_accum":
                yield from ((*place[1:], alias.name) for alias in node.names)


def problems(name, source):
    """What in a module's source breaks the rules. `name` is its path in the package."""
    found, room = [], name.split("/")[0].removesuffix(".py")
    for place in imports(name, source):
        other = place[0] if place[0] in FLOOR else "__init__"  # a public name
        allowed = room == other or FLOOR[other] < FLOOR[room] or (room in DOORS and other == "__init__")
        if not allowed:
            found.append(f"{room} imports {other}")
        found += [f"imports {part}" for part in place if part.startswith("_") and not part.endswith("__")]
    return found


def test_rooms_import_downwards_only():
    """And no module imports a private name."""
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert {name.split("/")[0].removesuffix(".py") for name in files} == set(FLOOR)
    assert {name: found for name, source in files.items() if (found := problems(name, source))} == {}


@pytest.mark.parametrize(("name", "source", "problem"), [
    ("core/update.py", "from ..steps.batch import layout", "core imports steps"),
    ("check/causes.py", "from ms_accum.batch_size import worth", "check imports batch_size"),
    ("distributed/ranks.py", "def f():\n    from .. import core", "distributed imports core"),
    ("steps/step.py", "from .. import Accumulator", "steps imports __init__"),
    ("core/update.py", "from .length import _stages", "imports _stages"),
])
def test_what_breaks_a_rule_is_found(name, source, problem):
    """Negative control: the same under TYPE_CHECKING, or on the way down, is allowed."""
    assert problems(name, source) == [problem]
    if " imports " in problem:
        assert problems(name, f"if TYPE_CHECKING:\n    {source}".replace("\n    from", "\n        from")) == []
    assert problems("steps/step.py", "from ..core.length import WindowLength\nfrom .batch import layout") == []


TRACE = """
import sys
from pathlib import Path
import mindspore as ms, numpy as np
from mindspore import nn
import ms_accum
from ms_accum import make_train_step

folder = Path(ms_accum.__file__).parent
network = nn.Dense(4, 2)
def forward_fn(x):
    return network(x).mean()
train_step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), 0.1), 2)
batch = ms.Tensor(np.ones((3, 4), np.float32))

def files_of(function):
    files = []
    def note(frame, event, argument):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(folder):
            files.append(file.relative_to(folder).as_posix())
    sys.setprofile(note)
    function()
    sys.setprofile(None)
    return files

for _ in range(2):
    train_step(batch)
for files in (files_of(lambda: train_step(batch)), files_of(lambda: train_step(batch)), files_of(lambda: None)):
    stays = [file for i, file in enumerate(files) if i == 0 or files[i - 1] != file]
    print(len(files), len(stays), len(set(files)))
"""


def test_the_way_of_a_gradient_is_short(monkeypatch):
    """A microbatch that is added, and one that also closes its window, op by op, after a first epoch: calls of
    functions of the package; stays, which are runs of calls in one file; files. Control: a function outside.
    """
    monkeypatch.setenv("MS_JIT", "0")
    lines = run_python(TRACE).splitlines()
    (calls, stays, files), (more_calls, more_stays, more_files), nothing = (
        tuple(map(int, line.split())) for line in lines)
    assert calls > stays > 10
    assert (stays <= 20, files <= 8) == (True, True), (stays, files)
    assert more_calls > more_stays > stays
    assert (more_stays <= 35, more_files <= 9) == (True, True), (more_stays, more_files)
    assert nothing == (0, 0, 0)


def test_an_accumulator_has_few_names_and_few_lines_reach_through_it():
    """Control: the pattern finds two attributes, and not one."""
    accumulator = Accumulator(nn.SGD(MLP().trainable_params()), 2, reduction="mean")
    assert len([name for name in dir(accumulator) if name[0] != "_"]) <= 28
    reaching = re.compile(r"\baccumulator\.[a-z_]+\.[a-z_]+")
    assert [bool(reaching.search(line)) for line in ("accumulator.window.unit", "accumulator.window")] == [True, False]
    lines = [line for path in PACKAGE.rglob("*.py") if path.name != "accumulator.py"
             for line in path.read_text(encoding="utf-8").splitlines()]
    assert sum(bool(reaching.search(line)) for line in lines if not re.match(r"\s*(#|>>>)", line)) <= 8

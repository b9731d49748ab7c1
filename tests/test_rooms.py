"""The shape of the package: rooms import downwards only, no private names, and all of it stays small."""
import ast
from collections import Counter
from pathlib import Path

import pytest
from support.processes import run_python

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
    print(len(files), len(set(files)))
"""


def test_the_way_of_a_microbatch_is_short():
    """One that is added, and one that also closes its window, in graphs: calls of functions of the package; files.

    Control: a function outside.
    """
    (calls, files), (more_calls, more_files), nothing = (
        tuple(map(int, line.split())) for line in run_python(TRACE).splitlines())
    assert 5 < calls <= 16
    assert calls < more_calls <= 24
    assert (files <= 6, more_files <= 6, nothing) == (True, True, (0, 0))


# --- how much there is ------------------------------------------------------------------------------------------------

# Lines of Python in each room, today. They go down with each change that takes something away, and are raised only by
# a commit whose subject says why.
BUDGET = {
    "__init__": 29, "__main__": 17, "arguments": 151, "batch_size": 557, "check": 791, "checkpoint": 572, "cli": 380,
    "core": 1777, "distributed": 896, "mindspore_api": 130, "model": 562, "runtime": 30, "selftest": 600,
    "steps": 1422, "tensors": 297,
}


def lines_of(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_room_grows():
    lines = Counter()
    for path in PACKAGE.rglob("*.py"):
        lines[path.relative_to(PACKAGE).parts[0].removesuffix(".py")] += lines_of(path)
    assert set(lines) == set(BUDGET)
    assert {room: number for room, number in lines.items() if number > BUDGET[room]} == {}


def sizes(source):
    """The attributes that each class of a module assigns or declares, and its methods: two numbers, by its name."""
    found = {}
    for kind in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        attributes = {node.attr for node in ast.walk(kind) if isinstance(node, ast.Attribute)
                      and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}
        attributes |= {node.target.id for node in kind.body if isinstance(node, ast.AnnAssign)}
        found[kind.name] = len(attributes), sum(isinstance(node, ast.FunctionDef) for node in kind.body)
    return found


def test_no_class_is_large():
    """Control: a class of two attributes and a method."""
    assert sizes("class It:\n    a: int\n    def b(self):\n        self.c = 1") == {"It": (2, 1)}
    of_all = {name: size for path in PACKAGE.rglob("*.py")
              for name, size in sizes(path.read_text(encoding="utf-8")).items()}
    attributes, methods = of_all.pop("Boundary")
    assert (attributes <= 18, methods <= 30, lines_of(PACKAGE / "core/boundary.py") <= 450) == (True, True, True)
    assert {name: size for name, size in of_all.items() if size[0] > 20 or size[1] > 28} == {}

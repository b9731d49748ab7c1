"""The shape of the package: rooms import downwards only, no private names, short functions; a call passes few files."""
import ast
import re
import sys
from pathlib import Path

import pytest
from mindspore import nn

import ms_accum
from ms_accum import Accumulator, make_train_step
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors
from ms_accum.tensors import global_norm

pytestmark = pytest.mark.core

PACKAGE = Path(__file__).parents[1] / "ms_accum"
# From the ground up. Rooms of one floor do not know each other; those of `DOORS` may import the public names.
FLOORS = (("tensors",), ("arguments", "runtime"), ("distributed",), ("core",), ("steps",),
          ("model", "checkpoint", "batch_size", "check"), ("cli",), ("selftest",), ("__init__", "__main__"))
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
DOORS = ("cli", "selftest")
SMALL = ("tensors", "arguments", "runtime", "distributed", "core", "steps", "model", "checkpoint")
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


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
    for node in ast.walk(ast.parse(source)) if room in SMALL else ():
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(member, FUNCTIONS) for member in node.body)
            found += [f"class {node.name} has {methods} methods"] * (methods > 20)
        if isinstance(node, FUNCTIONS):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body and body[-1].end_lineno - body[0].lineno >= 30:
                found.append(f"function {node.name} has more than 30 lines")
    return found


def test_rooms_import_downwards_only():
    """And no module imports a private name, and no function of the core is long."""
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert {name.split("/")[0].removesuffix(".py") for name in files} == set(FLOOR)
    assert {name: found for name, source in files.items() if (found := problems(name, source))} == {}


@pytest.mark.parametrize(("name", "source", "problem"), [
    ("core/update.py", "from ..steps.batch import layout", "core imports steps"),
    ("check/causes.py", "from ms_accum.batch_size import worth", "check imports batch_size"),
    ("distributed/ranks.py", "def f():\n    from .. import core", "distributed imports core"),
    ("steps/step.py", "from .. import Accumulator", "steps imports __init__"),
    ("core/update.py", "from .length import _stages", "imports _stages"),
    ("model/cell.py", "class Large:\n" + "".join(f"    def f{i}(self): pass\n" for i in range(21)),
     "class Large has 21 methods"),
    ("core/update.py", "def long():\n    '''Doc.'''\n" + "    x = 1\n" * 31, "function long has more than 30 lines"),
])
def test_what_breaks_a_rule_is_found(name, source, problem):
    """Negative control: the same under TYPE_CHECKING, or on the way down, is allowed."""
    assert problems(name, source) == [problem]
    if " imports " in problem:
        assert problems(name, f"if TYPE_CHECKING:\n    {source}".replace("\n    from", "\n        from")) == []
    assert problems("steps/step.py", "from ..core.length import WindowLength\nfrom .batch import layout") == []


def files_of(function, *arguments):
    """The files of the package whose Python functions run in a call; compiled graphs do not count."""
    found, installed = set(), Path(ms_accum.__file__).parent  # perhaps not PACKAGE

    def note(frame, event, argument):
        if Path(frame.f_code.co_filename).is_relative_to(installed):
            found.add(Path(frame.f_code.co_filename).relative_to(installed).as_posix())

    sys.setprofile(note)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return found


def test_a_call_passes_few_files():
    """By hand, op by op: 8 after the first call. A train step: 15, then 7. Control: a function of one file."""
    network, (x, y) = MLP(), tensors(*batches([4])[0])
    accumulator = Accumulator(nn.SGD(network.trainable_params()), 8)
    grads = tuple(p * 0 for p in accumulator.weights)
    accumulator(grads)
    assert len(files_of(accumulator, grads)) <= 8
    train_step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params()), 8)
    assert len(files_of(train_step, x, y)) <= 15
    assert len(files_of(train_step, x, y)) <= 7
    assert files_of(global_norm, grads) == {"tensors.py"}


def test_an_accumulator_has_few_names_and_few_lines_reach_through_it():
    """Control: the pattern finds two attributes, and not one."""
    assert len([name for name in dir(Accumulator(nn.SGD(MLP().trainable_params()), 2)) if name[0] != "_"]) <= 26
    reaching = re.compile(r"\baccumulator\.[a-z_]+\.[a-z_]+")
    assert [bool(reaching.search(line)) for line in ("accumulator.way.length", "accumulator.way")] == [True, False]
    lines = [line for path in PACKAGE.rglob("*.py") if path.name != "accumulator.py"
             for line in path.read_text(encoding="utf-8").splitlines()]
    assert sum(bool(reaching.search(line)) for line in lines if not re.match(r"\s*(#|>>>)", line)) <= 8

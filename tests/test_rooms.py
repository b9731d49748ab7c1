"""The shape of the package: rooms import downwards only, no private name of another module; short functions."""
import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

PACKAGE = Path(__file__).parents[1] / "ms_accum"
# From the ground up. Rooms of one floor do not know each other; those of `DOORS` may import the public names.
FLOORS = (("tensors",), ("arguments", "runtime"), ("distributed",), ("core",), ("steps",),
          ("model", "checkpoint", "batch_size", "check"), ("cli",), ("selftest", "examples"), ("__init__", "__main__"))
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
DOORS = ("cli", "selftest", "examples")
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

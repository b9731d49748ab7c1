"""The shape of the core: no private name of another module, and sizes that fit in one head."""
import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ms_accum"
CORE = sorted([*PACKAGE.glob("*.py"), *(PACKAGE / "distributed").glob("*.py")])
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


def body_lines(function):
    """The lines of a function without its signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return function.end_lineno - body[0].lineno + 1 if body else 0


def problems(name, source):
    """What in a module's source breaks the rules."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("ms_accum")):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [f"imports {name}" for name in names if name.startswith("_") and not name.endswith("__")]
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(member, FUNCTIONS) for member in node.body)
            found += [f"class {node.name} has {methods} methods"] * (methods > 20)
        if isinstance(node, FUNCTIONS) and body_lines(node) > 30:
            found.append(f"function {node.name} has {body_lines(node)} lines")
    lines = source.count("\n")
    return found + [f"has {lines} lines"] * (name == "accumulator.py" and lines > 350)


def test_modules_keep_the_rules():
    """Sizes: of the core. Names: of all modules."""
    broken = [(path.relative_to(PACKAGE), problem) for path in PACKAGE.rglob("*.py")
              for problem in problems(path.name, path.read_text(encoding="utf-8"))
              if path in CORE or problem.startswith("imports")]
    assert broken == []
    assert len(CORE) > 20


def test_what_breaks_a_rule_is_found():
    """Negative control."""
    long = "def long():\n    '''Doc.\n\n    Text.\n    '''\n" + "    x = 1\n" * 31
    large = "class Large:\n" + "".join(f"    def f{i}(self): pass\n" for i in range(21))
    source = f"from .window import _length\nfrom ms_accum.window import Window, _stages\n{long}{large}" + "\n" * 351
    assert sorted(problems("accumulator.py", source)) == [
        "class Large has 21 methods", "function long has 31 lines", f"has {len(source.splitlines())} lines",
        "imports _length", "imports _stages"]
    assert problems("window.py", long.replace("    x = 1\n", "", 1)) == []

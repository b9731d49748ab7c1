"""What is not in MindSpore's stable API: it is imported in one file, and without any of it ms_accum trains."""
import ast
import re
import runpy
from importlib import import_module
from pathlib import Path

import mindspore as ms
import pytest
from support.modes import recorded_warnings
from support.processes import run_python

from ms_accum import mindspore_api

PACKAGE = Path(mindspore_api.__file__).parent
WITHOUT_NAMES = Path(__file__).parent / "support" / "without_names.py"
NAMES = re.findall(r'found\("([\w.]+)", "(\w+)"', Path(mindspore_api.__file__).read_text(encoding="utf-8"))
STABLE = {"mindspore", "mindspore.common.initializer", "mindspore.dataset", "mindspore.ops", "mindspore.train"}


@pytest.mark.slow
def test_without_each_name_it_trains():
    """Without a warning. The newest graph mode also takes unmarked classes."""
    assert len(NAMES) == 13
    run_python(WITHOUT_NAMES, *(f"{module}:{name}" for module, name in NAMES if hasattr(import_module(module), name)),
               *["mindspore:unmarked"] * ms.__version__.startswith("2.10."))


def test_a_name_that_is_missing_is_replaced():
    """Controls: one that is there, and a module that is not."""
    assert mindspore_api.found("mindspore.ops", "isconstant", None) is ms.ops.isconstant
    assert mindspore_api.found("mindspore.ops", "no_such_name", 1) == 1
    assert mindspore_api.found("mindspore.none", "it", 1) == 1


@pytest.mark.parametrize(("version", "is_said"), [
    ("2.7.0", False), ("2.10.0", False), ("2.10.1rc1", False), ("2.11.0rc1", True), ("3.0.0", True)])
def test_a_newer_version_is_told_of_the_selftest(version, is_said):
    with recorded_warnings() as said:
        mindspore_api.warn_if_untried(version)
    assert [f"MindSpore {version} " in str(one.message) and "`ms-accum selftest`" in str(one.message) for one in said
            ] == [True] * is_said


def test_the_newest_version_is_that_of_the_matrix():
    pairs = runpy.run_path(str(Path(__file__).parent / "matrix"))["PAIRS"]
    assert max(tuple(map(int, version.split(".")[:2])) for version, _ in pairs) == mindspore_api.NEWEST


# --- one file ---------------------------------------------------------------------------------------------------------


def unstable(source):
    """The names of MindSpore in a source that are not in its stable API."""
    tree, known = ast.parse(source), {}
    names = {f"{module}.{name}" for module, name in NAMES} | {module for module, _ in NAMES} - STABLE

    def dotted(node):
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return known.get(node.id, "") if isinstance(node, ast.Name) else ""

    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known.update({alias.asname or alias.name: alias.name for alias in node.names})
            found |= {alias.name for alias in node.names if alias.name.startswith("mindspore.")} - STABLE
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("mindspore."):
            for name in (alias.name for alias in node.names):
                known[name] = f"{node.module}.{name}"
                if node.module not in STABLE or name.startswith("_"):
                    found.add(known[name])
    used = {dotted(node) for node in ast.walk(tree) if isinstance(node, (ast.Attribute, ast.Name))}
    return found | {name for name in used if name in names or re.match(r"mindspore\..*\b_[^_]", name)}


def test_no_other_file_uses_a_name_that_is_not_stable():
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "mindspore_api.py"]
    assert len(files) > 60
    assert {path.name: found for path in files if (found := unstable(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(("source", "found"), [
    ("from mindspore.common.seed import _KERNEL_SEED", "mindspore.common.seed._KERNEL_SEED"),
    ("from mindspore.graph.api import jit", "mindspore.graph.api.jit"),
    ("import mindspore as ms\n@ms.jit_class\nclass Kind: ...", "mindspore.jit_class"),
    ("from mindspore import jit_class\n@jit_class\nclass Kind: ...", "mindspore.jit_class"),
    ("from mindspore import ops\nprint(ops.isconstant(1))", "mindspore.ops.isconstant"),
    ("def late():\n    from mindspore.communication import get_rank", "mindspore.communication.get_rank"),
    ("import mindspore.communication", "mindspore.communication"),
    ("import mindspore as ms\nprint(ms.communication)", "mindspore.communication"),
    ("import mindspore as ms\nms.ops._private()", "mindspore.ops._private"),
])
def test_such_a_name_is_found(source, found):
    """Negative control: beside names that are stable."""
    stable = "import mindspore as ms\nfrom mindspore import nn\nprint(nn.Dense, ms.__version__, ms.runtime.Event)\n"
    assert unstable(stable + source) == {found}
    assert unstable(stable) == set()

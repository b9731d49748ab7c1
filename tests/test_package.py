"""The public door, the examples in README and docstrings, and what README says about the repository."""
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import run_python

import ms_accum

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", [
    "Accumulator", "make_train_step", "avoid_busy_waiting", "GradientNoiseScale", "scale_lr", "plan_micro_batch", "make_grad_cache_step"])
def test_public_names_are_documented(name):
    assert inspect.getdoc(getattr(ms_accum, name))
    assert getattr(ms_accum, name).__module__.startswith("ms_accum.")


def test_every_module_says_what_it_is():
    modules = [m.name for m in pkgutil.walk_packages(ms_accum.__path__, "ms_accum.") if not m.name.endswith("__main__")]
    assert "ms_accum.accumulator" in modules
    assert all(importlib.import_module(m).__doc__ for m in modules)


PREAMBLE = """
import numpy as np, mindspore as ms
from mindspore import Tensor
from ms_accum import avoid_busy_waiting
avoid_busy_waiting()
rng = np.random.default_rng(0)
dataset = [(Tensor(rng.random((n, 784), np.float32)), Tensor(rng.integers(0, 10, n), ms.int32)) for n in [8] * 10 + [3]]
"""


def test_readme_example_runs_and_trains():
    ending = """
assert int(accumulator.update_step) == 3 and int(accumulator.mini_step) == 0
print(float(loss))
"""
    assert 1.0 < float(run_python(PREAMBLE + PYTHON_BLOCKS[0] + ending)) < 3.5


def test_readme_drop_in_runs():
    ending = """
for data, label in dataset[:8]:
    train_step(data, label)
assert int(accumulator.update_step) == 2
print("trained")
"""
    script = PYTHON_BLOCKS[0].split("train_step =")[0] + PYTHON_BLOCKS[1] + ending
    assert run_python(PREAMBLE + script).strip().endswith("trained")


def test_readme_contrastive_example_trains():
    block, = [block for block in PYTHON_BLOCKS if "make_grad_cache_step" in block]
    assert float(run_python(block)) < 0.5 * np.log(64)  # where it starts, about


def test_readme_plan_is_of_a_step_that_runs():
    block, = [block for block in PYTHON_BLOCKS if "def make_step" in block]
    assert 2.0 < float(run_python(block + "print(float(make_step(64)()))")) < 2.6  # ln 10


def test_readme_signatures_are_the_real_ones():
    signatures = PYTHON_BLOCKS[2]
    for function in (ms_accum.Accumulator, ms_accum.make_train_step):
        for parameter in list(inspect.signature(function).parameters.values()):
            default = "" if parameter.default is parameter.empty else "=" + repr(parameter.default).replace("'", '"')
            assert f"{parameter.name}{default}" in signatures


@pytest.mark.parametrize("documented", [ms_accum.Accumulator, ms_accum.GradientNoiseScale, ms_accum.scale_lr])
def test_docstring_examples(documented):
    """As a script: graph mode does not find the names of a doctest's functions."""
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(documented))
    assert any(example.want for example in examples)
    assert run_python("".join(example.source for example in examples)) == "".join(example.want for example in examples)


def test_readme_file_tree_is_true():
    tree = re.search(r"^## Files\n+```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[1]
    named, folders = set(), []
    for line in tree.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders[depth:] = [name]
        if not name.endswith("/"):
            named.add("".join(folders[:depth]) + name)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("no git checkout to compare with")
    code = {f for f in tracked if f.endswith(".py") and "/digits/" not in f and not f.endswith(("__main__.py", "mnist/__init__.py"))}
    assert named & code == code
    assert all((ROOT / f).exists() for f in named)


def test_ci_runs_the_readmes_test_command():
    commands = re.findall(r"^python3 -m venv .*pytest.*$", README, re.MULTILINE)
    assert len(commands) == 1
    assert "grep -m1 '^python3 -m venv .*pytest' README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")

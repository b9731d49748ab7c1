"""The public doors, the examples in README and docstrings, and what README says about the repository."""
import doctest
import importlib
import inspect
import pkgutil
import re
import runpy
import sys
from pathlib import Path

import matplotlib
import pytest
from conftest import run_python

import ms_accum
from ms_accum import batch_size, distributed

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS, PRINTED = (re.findall(rf"^```{kind}\n(.*?)^```", README, re.MULTILINE | re.DOTALL) for kind in ("python", "text"))


PUBLIC = {name: value for door in (ms_accum, batch_size, distributed) for name, value in vars(door).items()
          if inspect.isclass(value) or inspect.isfunction(value)}
# An exception is documented where it is raised.
EXCEPTIONS = [name for name, value in PUBLIC.items() if inspect.isclass(value) and issubclass(value, Exception)]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    text = inspect.getdoc(PUBLIC[name])
    if name not in EXCEPTIONS:
        assert "Example:" in text
        assert "Source:" in text
    assert PUBLIC[name].__module__.startswith("ms_accum.")


def test_every_module_says_what_it_is():
    modules = [m.name for m in pkgutil.walk_packages(ms_accum.__path__, "ms_accum.") if not m.name.endswith("__main__")]
    assert "ms_accum.accumulator" in modules
    assert all(importlib.import_module(m).__doc__ for m in modules)


def docstring_script(name):
    """The source of a public name's examples, and what they print."""
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(PUBLIC[name]))
    assert any(example.want for example in examples), name
    return "".join(example.source for example in examples), "".join(example.want for example in examples)


def readme_scripts():
    """README's block as a script with what it says it prints, and the calls of its table, which evaluate."""
    rows = README.split("## Which call for me?")[1].split("\n\n")[1].splitlines()[2:]
    cells = [cell for row in rows for cell in re.findall(r"`([^`]+)`", row.split("|")[2])]
    calls = [cell for cell in cells if re.match(r"(make_|Accumulator|FlushCallback|Model)", cell)]
    assert len(calls) == 5
    needed = """
from mindspore.train import Model
from ms_accum import Accumulator, FlushCallback, TrainOneStepCell, make_grad_cache_step
network_with_loss = nn.WithLossCell(network, loss_fn)
encode_fn = network
def built(step):
    assert step is not None
"""
    return {"readme": ("".join(PYTHON_BLOCKS), "".join(PRINTED)),
            "tables": (PYTHON_BLOCKS[0].split("train_step = ")[0] + needed + "\n".join(f"built({call})" for call in calls), "")}


def test_readme_is_short_and_each_of_its_blocks_is_run():
    assert len(README.splitlines()) <= 130
    assert [len(PYTHON_BLOCKS), len(PRINTED)] == [1, 1]
    assert README.count("It prints:\n\n```text\n") == 1


IMPORT = """
import os
os.environ.pop("MS_DEV_HOST_BLOCKING_RUN", None)
import mindspore as ms
def state():
    return dict(os.environ), ms.get_context("mode"), ms.get_context("device_target"), ms.get_seed()
before = state()
import ms_accum
print("unchanged" if state() == before else "changed")
"""


def test_importing_changes_no_global_state_and_examples_of_docstrings_and_readme_run():
    """As files that one process runs: graph mode does not find the names of a doctest's functions."""
    names = [name for name in PUBLIC if name not in (*EXCEPTIONS, "plan_micro_batch")]  # its trials run the main script, too
    scripts = {**{f"doc_{name}": docstring_script(name) for name in names}, **readme_scripts()}
    for name, (script, _) in scripts.items():
        Path(f"example_{name}.py").write_text(script, encoding="utf-8")
    run = "".join(f"print('--- {name}')\nrunpy.run_path('example_{name}.py', run_name='example_{name}')\n" for name in scripts)
    imported, *parts = run_python(IMPORT + "import runpy\n" + run).split("--- ")
    assert imported == "unchanged\n"
    printed = dict(part.split("\n", 1) for part in parts)
    assert printed == {name: expected for name, (_, expected) in scripts.items()}


@pytest.mark.slow  # three processes that fill gigabytes
def test_the_example_of_planning_runs():
    script, expected = docstring_script("plan_micro_batch")
    assert run_python(script) == expected


def test_readmes_figure_is_drawn_from_a_run_whose_parameter_moves_at_every_fourth_microbatch(monkeypatch, capsys):
    assert (ROOT / "tutorials" / "accumulation.svg").exists()
    monkeypatch.syspath_prepend(ROOT / "tutorials")
    monkeypatch.setattr(sys, "argv", ["figure.py", "figure.svg"])
    with matplotlib.rc_context():
        importlib.import_module("figure").main()
    assert capsys.readouterr().out == "figure.svg: the parameter moved at microbatches 4, 8, 12\n"
    assert Path("figure.svg").read_text(encoding="utf-8").count("emptied") == 3


def test_ci_runs_the_readmes_test_command():
    commands = re.findall(r"^python3 -m venv .*pytest.*$", README, re.MULTILINE)
    assert len(commands) == 1
    assert "grep -m1 '^python3 -m venv .*pytest' README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_github_runs_the_versions_of_the_matrix():
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert re.findall(r'mindspore: "(.+?)", python: "(.+?)"', workflow) == runpy.run_path(str(ROOT / "tests" / "matrix"))["PAIRS"]

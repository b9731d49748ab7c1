"""The public door, the examples in README and docstrings, and what README says about the repository."""
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

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


PUBLIC = sorted(name for name, value in vars(ms_accum).items() if inspect.isclass(value) or inspect.isfunction(value))
# An exception is documented where it is raised.
EXCEPTIONS = [name for name in PUBLIC if inspect.isclass(getattr(ms_accum, name)) and issubclass(getattr(ms_accum, name), Exception)]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    text = inspect.getdoc(getattr(ms_accum, name))
    if name not in EXCEPTIONS:
        assert "Example:" in text
        assert "Source:" in text
    assert getattr(ms_accum, name).__module__.startswith("ms_accum.")


def test_every_module_says_what_it_is():
    modules = [m.name for m in pkgutil.walk_packages(ms_accum.__path__, "ms_accum.") if not m.name.endswith("__main__")]
    assert "ms_accum.accumulator" in modules
    assert all(importlib.import_module(m).__doc__ for m in modules)


def block_with(text):
    """The one block of README that holds `text`."""
    (block,) = [block for block in PYTHON_BLOCKS if text in block]
    return block


def docstring_script(name):
    """The source of a public name's examples, and what they print."""
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(getattr(ms_accum, name)))
    assert any(example.want for example in examples), name
    return "".join(example.source for example in examples), "".join(example.want for example in examples)


PREAMBLE = """
import numpy as np, mindspore as ms
from mindspore import Tensor
from ms_accum import avoid_busy_waiting
avoid_busy_waiting()
rng = np.random.default_rng(0)
dataset = [(Tensor(rng.random((n, 784), np.float32)), Tensor(rng.integers(0, 10, n), ms.int32)) for n in [8] * 10 + [3]]
"""
MODEL = """
from mindspore.dataset import GeneratorDataset
rows = [(rng.random((n, 784), np.float32), rng.integers(0, 10, n).astype(np.int32)) for n in [8] * 9]
dataset = GeneratorDataset(rows, ["data", "label"], shuffle=False)
"""
MODEL_ENDING = """
assert int(train_cell.accumulator.update_step) == 18
assert len(open("windows.csv").readlines()) == 10
"""
HOOK_ENDING = """
cell = TrainOneStepCell(nn.WithLossCell(network, loss_fn), accumulator)
dataset = GeneratorDataset(rows, ["data", "label"], shuffle=False)
Model(cell).train(1, dataset, callbacks=[FlushCallback()], dataset_sink_mode=False)
first, average = network.trainable_params()[0].asnumpy(), average.averages[0].asnumpy()
assert (first != average).any() and np.abs(first - average).max() < 0.1
"""


def readme_scripts():
    """README's blocks as scripts, by name, with what they need before them and what they must have done after them."""
    start = PREAMBLE + PYTHON_BLOCKS[0].split("train_step =")[0]
    table = README.split("### Coming from elsewhere")[1].split("\n\n")[1]
    cells = [row.split("|")[3] for row in table.splitlines()[2:]]
    lines = [line for cell in cells for line in re.findall(r"`([^`]+)`", cell) if line not in ("loss / 4", "flush()")]
    assert (len(cells), len(lines)) == (11, 13)
    return {
        "first": PREAMBLE + PYTHON_BLOCKS[0] + "assert (int(accumulator.update_step), int(accumulator.mini_step)) == (3, 0)\n"
                 "assert 1.0 < float(loss) < 3.5",
        "drop_in": start + PYTHON_BLOCKS[1] + "for data, label in dataset[:8]:\n    train_step(data, label)\n"
                   "assert int(accumulator.update_step) == 2",
        "contrastive": block_with("make_grad_cache_step") + "assert float(loss) < 0.5 * np.log(64)  # where it starts, about",
        "plan": block_with("def make_step") + "assert 2.0 < float(make_step(64)()) < 2.6  # ln 10",
        "model": start + MODEL + block_with("Model(train_cell") + block_with("PerUpdate(LearningRateScheduler") + MODEL_ENDING
                 + block_with("class MovingAverage") + HOOK_ENDING,
        # Each cell of the last column evaluates, on one process.
        "migration": start + "from mindspore.train import Model\n"
                     "from ms_accum import DataParallel, FlushCallback, TrainOneStepCell, by_epoch\n"
                     "net_with_loss, eval_net = nn.WithLossCell(network, loss_fn), nn.WithEvalCell(network, loss_fn)\n" + "\n".join(lines),
        # Ranks without `init()`, as its comment says, on one device.
        "short": start + block_with('save_checkpoint("run.ckpt"') + 'assert extra == {"epoch": 3, "position": 1200}\n'
                 + block_with("reducer=DataParallel()").replace("\ninit()", "\n# init()") + block_with("scale_lr(0.01, 8)")
                 + "assert accumulator.noise_scale is noise_scale",
    }


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
    docstrings = {f"doc_{name}": docstring_script(name) for name in names}
    scripts = {**{name: script for name, (script, _) in docstrings.items()}, **readme_scripts()}
    for name, script in scripts.items():
        Path(f"example_{name}.py").write_text(script, encoding="utf-8")
    run = "".join(f"print('--- {name}')\nrunpy.run_path('example_{name}.py', run_name='example_{name}')\n" for name in scripts)
    imported, *parts = run_python(IMPORT + "import runpy\n" + run).split("--- ")
    assert imported == "unchanged\n"
    printed = dict(part.split("\n", 1) for part in parts)
    assert printed.keys() == scripts.keys()
    assert {name: printed[name] for name in docstrings} == {name: expected for name, (_, expected) in docstrings.items()}
    assert printed["model"].count("loss is") == 27


@pytest.mark.slow  # three processes that fill gigabytes
def test_the_example_of_planning_runs():
    script, expected = docstring_script("plan_micro_batch")
    assert run_python(script) == expected


def test_no_block_of_readme_is_untested():
    """What each of them holds that the tests here (the check's: test_equivalence.py) find it by."""
    tested = (PYTHON_BLOCKS[0], PYTHON_BLOCKS[1], PYTHON_BLOCKS[2], *map(block_with, (
        "Model(train_cell", "PerUpdate(LearningRateScheduler", "class MovingAverage", 'save_checkpoint("run.ckpt"',
        "reducer=DataParallel()",
        "scale_lr(0.01, 8)", "print(check_equivalence", "def make_step", "make_grad_cache_step")))
    assert sorted(tested) == sorted(PYTHON_BLOCKS)


def test_readme_signatures_are_the_real_ones():
    signatures = PYTHON_BLOCKS[2]
    for function in (ms_accum.Accumulator, ms_accum.make_train_step, ms_accum.TrainOneStepCell):
        for parameter in list(inspect.signature(function).parameters.values()):
            default = "" if parameter.default is parameter.empty else "=" + repr(parameter.default).replace("'", '"')
            assert f"{parameter.name}{default}" in signatures


def test_readme_file_tree_is_true():
    tree = re.search(r"^## Files\n+```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[1]
    named, folder = set(), ""
    for line in tree.splitlines():
        name = line.split()[0]
        folder = name if not line.startswith(" ") else folder
        named.add(name if folder == name else folder + name)
    assert all((ROOT / name).exists() for name in named)
    packages = {f"ms_accum/{path.parent.name}/" for path in (ROOT / "ms_accum").glob("*/__init__.py")}
    assert packages < named


@pytest.mark.parametrize("page", ["README.md", "tutorials/README_CN.md"])
def test_readme_names_tests_that_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    named = re.findall(r"`(test_\w+)(…?)`", text)
    assert len(named) > 10
    assert [name for name, rest in named if not any(f"def {name}{'' if rest else '('}" in source for source in sources)] == []
    assert [path for path in re.findall(r"`(tests/[\w/]+\.py)`", text) if not (ROOT / path).exists()] == []


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

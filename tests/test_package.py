"""The public door, the examples in README and docstrings, and what README says about the repository."""
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import run_python

import ms_accum

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


PUBLIC = sorted(name for name, value in vars(ms_accum).items() if inspect.isclass(value) or inspect.isfunction(value))
ERRORS = {name for name in PUBLIC if inspect.isclass(getattr(ms_accum, name)) and issubclass(getattr(ms_accum, name), Exception)}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    text = inspect.getdoc(getattr(ms_accum, name))
    assert name in ERRORS or ("Example:" in text and "Source:" in text)
    assert text
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


def block_with(text):
    """The one block of README that holds `text`."""
    (block,) = [block for block in PYTHON_BLOCKS if text in block]
    return block


def test_readme_contrastive_example_trains():
    assert float(run_python(block_with("make_grad_cache_step"))) < 0.5 * np.log(64)  # where it starts, about


def test_readme_plan_is_of_a_step_that_runs():
    assert 2.0 < float(run_python(block_with("def make_step") + "print(float(make_step(64)()))")) < 2.6  # ln 10


MODEL_DATA = """
from mindspore.dataset import GeneratorDataset
rows = [(rng.random((n, 784), np.float32), rng.integers(0, 10, n).astype(np.int32)) for n in [8] * 9]
dataset = GeneratorDataset(rows, ["data", "label"], shuffle=False)
"""


def test_readme_model_trains():
    """The three lines, the callbacks and the hook."""
    start = PREAMBLE + PYTHON_BLOCKS[0].split("train_step =")[0] + MODEL_DATA
    ending = """
assert int(train_cell.accumulator.update_step) == 18
assert len(open("windows.csv").readlines()) == 10
"""
    hook = "\nfrom mindspore import ops\n" + block_with("class MovingAverage") + """
cell = TrainOneStepCell(nn.WithLossCell(network, loss_fn), accumulator)
dataset = GeneratorDataset(rows, ["data", "label"], shuffle=False)
Model(cell).train(1, dataset, callbacks=[FlushCallback()], dataset_sink_mode=False)
first, average = network.trainable_params()[0].asnumpy(), average.averages[0].asnumpy()
assert (first != average).any() and np.abs(first - average).max() < 0.1
"""
    script = start + block_with("Model(train_cell") + block_with("PerUpdate(LearningRateScheduler") + ending + hook
    assert run_python(script).count("loss is") == 27


def test_readme_migration_lines_run():
    """Each cell of the last column evaluates, on one process."""
    table = README.split("### Coming from elsewhere")[1].split("\n\n")[1]
    cells = [row.split("|")[3] for row in table.splitlines()[2:]]
    assert len(cells) == 11
    lines = [line for cell in cells for line in re.findall(r"`([^`]+)`", cell) if line not in ("loss / 4", "flush()")]
    start = PREAMBLE + PYTHON_BLOCKS[0].split("train_step =")[0] + """
from mindspore.train import Model
from ms_accum import DataParallel, FlushCallback, TrainOneStepCell, by_epoch
net_with_loss, eval_net = nn.WithLossCell(network, loss_fn), nn.WithEvalCell(network, loss_fn)
"""
    assert len(lines) == 13
    assert run_python(start + "\n".join(lines) + "\nprint('done')").endswith("done\n")


def test_readmes_short_examples_run():
    """Checkpoint, ranks (without `init()`, as its comment says, on one device) and noise scale."""
    start = PREAMBLE + PYTHON_BLOCKS[0].split("train_step =")[0]
    ranks = block_with("reducer=DataParallel()").replace("\ninit()", "\n# init()")
    ending = """
assert extra == {"epoch": 3, "position": 1200}
assert accumulator.noise_scale is noise_scale
print("ran")
"""
    script = start + block_with('save_checkpoint("run.ckpt"') + ranks + block_with("scale_lr(0.01, 8)") + ending
    assert run_python(script).endswith("ran\n")


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


def test_docstring_examples():
    """Every public name has one, and prints what it says. As a script: graph mode does not find the names of a doctest's functions."""
    script, expected = [], []
    for name in sorted({*PUBLIC} - ERRORS):
        examples = doctest.DocTestParser().get_examples(inspect.getdoc(getattr(ms_accum, name)))
        assert any(example.want for example in examples), name
        if name == "plan_micro_batch":  # its trials run the script, too
            assert run_python("".join(example.source for example in examples)) == "".join(example.want for example in examples)
            continue
        script.append(f"print('--- {name}')\n" + "".join(example.source for example in examples))
        expected.append(f"--- {name}\n" + "".join(example.want for example in examples))
    assert run_python("".join(script)) == "".join(expected)


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


def test_readmes_figure_is_drawn_from_a_run_whose_parameter_moves_at_every_fourth_microbatch():
    assert (ROOT / "tutorials" / "accumulation.svg").exists()
    done = subprocess.run([sys.executable, ROOT / "tutorials" / "figure.py", "figure.svg"], capture_output=True, text=True, check=True)
    assert done.stdout == "figure.svg: the parameter moved at microbatches 4, 8, 12\n"
    assert Path("figure.svg").read_text(encoding="utf-8").count("emptied") == 3


def test_ci_runs_the_readmes_test_command():
    commands = re.findall(r"^python3 -m venv .*pytest.*$", README, re.MULTILINE)
    assert len(commands) == 1
    assert "grep -m1 '^python3 -m venv .*pytest' README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")

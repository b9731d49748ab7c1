"""The example scripts, tutorials/mnist/train.py, compare.py and tutorials/lm/train.py, and the modules beside them."""
import os
import runpy
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import mindspore as ms

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "tutorials"


@contextmanager
def beside(folder):
    """Let imports find the modules in a folder of `TUTORIALS`. Both have a `data` and a `train`: forget those later."""
    with patch.object(sys, "path", [str(TUTORIALS / folder), *sys.path]):
        try:
            yield
        finally:
            for name in ("data", "train"):
                sys.modules.pop(name, None)


def module(folder, name):
    """Return the module that the script in a folder imports by this name."""
    with beside(folder):
        return import_module(name)


def run_here(folder, *arguments, script="train.py"):
    """Run a script in this process, and return its variables. `folder` may be that of a copy."""
    path = str(TUTORIALS / folder / script)
    with beside(folder), patch.object(sys, "argv", [path, *map(str, arguments)]):
        return runpy.run_path(path, run_name="__main__")


def saved(path):
    """Return the bytes of all that a checkpoint holds, but for its description."""
    found = ms.load_checkpoint(str(path), format="safetensors")
    return {name: value.asnumpy().tobytes() for name, value in found.items() if name != "ms_accum"}


def start(folder, *arguments):
    """Start the script as a user does, in a process of its own."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen([sys.executable, TUTORIALS / folder / "train.py", *arguments], text=True,
                            env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(folder, *arguments):
    """Return what the script prints in a process of its own."""
    with start(folder, *arguments) as running:
        out, error = running.communicate()
    assert running.returncode == 0, error
    return out

"""What all tests share: the modes, a network to train, and a scratch folder for what MindSpore writes into the cwd."""
import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import count
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from hypothesis import settings
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.ops.composite import base
from modes import MODES, running

from ms_accum import avoid_busy_waiting

try:
    from mindspore.graph import api
except ImportError:  # MindSpore 2.8 and older
    from mindspore.common import api

avoid_busy_waiting()
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    # Each worker has its share of the cores: threads of MindSpore spin while they wait, and take time from others.
    cores, number = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.sched_setaffinity(0, cores[number % len(cores)::int(os.environ["PYTEST_XDIST_WORKER_COUNT"])])
# The same examples in every run, however slow the machine.
settings.register_profile("suite", derandomize=True, deadline=None, database=None)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _scratch_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def pytest_unconfigure():
    """Silence Cells that live until the interpreter exits: their `__del__` then uses modules that are gone."""
    del nn.Cell.__del__


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run tests marked `fresh_process` in a process of their own, without what other tests imported and compiled."""
    marker = pyfuncitem.get_closest_marker("fresh_process")
    if marker is None or "FRESH_PROCESS" in os.environ or not set(marker.args) & set(pyfuncitem.callspec.id.split("-")):
        return None
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    environment = {**os.environ, "FRESH_PROCESS": "1"}
    folder = pyfuncitem.config.rootpath
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout, done.stdout
    return True


_sizes = count(3)
_errors = []  # of MindSpore, since it last compiled


def _noting(function):
    """`function`, whose errors are noted."""
    @wraps(function)
    def noted(*arguments, **options):
        try:
            return function(*arguments, **options)
        except BaseException as error:
            _errors.append(repr(error))
            raise

    return noted


# Compilations, runs of graphs, and gradients that are taken op by op.
api._JitExecutor.__call__ = _noting(api._JitExecutor.__call__)  # noqa: SLF001
api._CellGraphExecutor.__call__ = _noting(api._CellGraphExecutor.__call__)  # noqa: SLF001
api._CellGraphExecutor.compile = _noting(api._CellGraphExecutor.compile)  # noqa: SLF001
_GRADIENT = (base, "_pynative_func_grad_forward") if hasattr(base, "_pynative_func_grad_forward") else (
    base._Grad, "_pynative_forward_run")  # MindSpore 2.7 and 2.8  # noqa: SLF001
setattr(*_GRADIENT, _noting(getattr(*_GRADIENT)))


def recover():
    """Compile a small new graph: after an error, MindSpore 2.10 may fail to compile the next one, not the one after."""
    size = next(_sizes)
    with suppress(RuntimeError), pytest.MonkeyPatch.context() as patch:
        patch.delenv("MS_JIT", raising=False)  # 0 turns compilation off
        ms.jit(ms.grad(_gathered))(Tensor(np.ones((1, size), np.float32)), Tensor(np.zeros((1, size), np.int64)))
    _errors.clear()


def _recover_from_errors():
    if _errors:
        recover()


def _gathered(values, index):
    return ops.gather_d(values, -1, index).sum()


@pytest.fixture(autouse=True)
def _forget_errors():
    yield
    _recover_from_errors()


_raises = pytest.raises


@contextmanager
def _raises_and_recovers(*expected, **options):
    with _raises(*expected, **options) as caught:
        yield caught
    _recover_from_errors()


pytest.raises = _raises_and_recovers


@pytest.fixture
def mode_named():
    """Set the context to a name in MODES until the test ends."""
    def set_mode(mode):
        ms.set_context(mode=MODES[mode])
        return mode

    yield set_mode
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.fixture(params=["jit", "pynative"])
def mode(request, mode_named):
    return mode_named(request.param)


@pytest.fixture
def uncompiled():
    with running("pynative"):
        yield


def compiled_graphs():
    """How many graphs MindSpore has compiled in this process."""
    return len(api.ms_compile_cache)


def compiled(function, mode):
    """Return `function` as the mode runs it."""
    return function if mode == "pynative" else ms.jit(function)


class MLP(nn.Cell):
    """The network of tests/support/reference.py, with the same initial weights for the same seed."""

    def __init__(self, features=6, hidden=5, classes=3, seed=0):
        super().__init__()
        self.first = nn.Dense(features, hidden)
        self.second = nn.Dense(hidden, classes)
        rng = np.random.default_rng(seed)
        for parameter in self.trainable_params():
            parameter.set_data(ms.Tensor(rng.normal(0, 0.5, parameter.shape), ms.float32))

    def construct(self, x):
        return self.second(ms.ops.tanh(self.first(x)))


def mean_loss(network):
    """Return the forward function `(x, y) -> loss` of a classifier, whose loss is float32 in any case."""
    loss_fn = nn.CrossEntropyLoss()

    def forward_fn(x, y):
        return loss_fn(network(x).astype(ms.float32), y)
    return forward_fn


MEMORY = Path(__file__).parent / "support" / "memory.py"  # a program for `run_python`


def tensors(x, y):
    """Return a batch of `batches` as Tensors."""
    return Tensor(x, ms.float32), Tensor(y, ms.int32)


class Clip(nn.Cell):
    """The identity, whose backward pass is not linear: it clips gradients to ±bound."""

    def __init__(self, bound):
        super().__init__()
        self.bound = bound

    def construct(self, x):
        return x

    def bprop(self, x, out, dout):
        return (ops.clamp(dout, -self.bound, self.bound),)


class Counting(nn.Cell):
    """An optimizer that counts its calls and keeps the gradients it got, in graph mode too."""

    def __init__(self, weights):
        super().__init__()
        self.parameters = weights
        self.seen = ParameterTuple([Parameter(Tensor(np.zeros(p.shape), p.dtype), f"seen.{p.name}") for p in weights])
        self.calls = Parameter(Tensor(0, ms.int32), name="calls")

    def construct(self, grads):
        for seen, grad in zip(self.seen, grads):
            ops.assign(seen, grad)
        ops.assign_add(self.calls, 1)
        return True


def run_python(code, *arguments):
    """Return the output of `code`, or of a file, in a new process; from a file, for graph mode reads the source."""
    code = code.read_text(encoding="utf-8") if isinstance(code, Path) else code
    Path("script.py").write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, "script.py", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def values(parameters):
    """Return Parameters or Tensors as float64 arrays."""
    return [np.array(p.asnumpy(), np.float64) for p in parameters]


def difference(got, expected):
    """Return the largest difference, relative to the largest magnitude of each array, or absolute where that is 0."""
    return max(np.abs(g - e).max() / (np.abs(e).max() or 1.0) for g, e in zip(got, expected))


def batches(sizes, features=6, classes=3, seed=1):
    """Return [(x float64 (n, features), y int (n,))] for each n in sizes."""
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, features)), rng.integers(0, classes, n)) for n in sizes]

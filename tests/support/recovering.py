"""A plugin of pytest that keeps an error of MindSpore from failing the next test.

After an error inside a compilation, or inside a gradient that is taken op by op, the next compilation of MindSpore 2.10
can fail (in GatherDGradV2), whatever it compiles; the one after it works. Many tests raise such errors on purpose. So
this plugin notes each error that leaves MindSpore, and then compiles a small graph that nobody needs, which may fail:

- when the block of a `pytest.raises` ends. Therefore it replaces `pytest.raises`;
- when a test ends;
- where a test or a helper asks for it: `recover()`.

To import this module is enough to have errors noted and `pytest.raises` replaced, in a process without pytest, too. It
also keeps Cells from failing when the interpreter exits.
"""
from contextlib import contextmanager
from functools import wraps

import pytest
from mindspore import nn
from mindspore.ops.composite import base

from ms_accum.selftest import modes

try:
    from mindspore.graph import api
except ImportError:  # MindSpore 2.8 and older
    from mindspore.common import api

_raises = pytest.raises
_errors = []  # of MindSpore, since it last compiled


def recover():
    """Compile a small new graph, which may fail."""
    modes.recover()
    _errors.clear()


def _recover_from_errors():
    if _errors:
        recover()


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


@contextmanager
def _raises_and_recovers(*expected, **options):
    with _raises(*expected, **options) as caught:
        yield caught
    _recover_from_errors()


pytest.raises = _raises_and_recovers


@pytest.fixture(autouse=True)
def _forget_errors():
    yield
    _recover_from_errors()


def pytest_unconfigure():
    """Silence Cells that live until the interpreter exits: their `__del__` then uses modules that are gone."""
    del nn.Cell.__del__

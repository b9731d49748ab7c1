"""How a test runs: op by op or compiled; and what MindSpore compiled and said of it."""
from contextlib import contextmanager

import mindspore as ms
import pytest

try:
    from mindspore.graph.api import ms_compile_cache
except ImportError:  # MindSpore 2.8 and older
    from mindspore.common.api import ms_compile_cache

# "jit": a jitted function in MindSpore's default context. "graph": everything in GRAPH_MODE. "pynative": op by op.
MODES = {"jit": ms.PYNATIVE_MODE, "graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}


@contextmanager
def running(mode):
    """As one of MODES; "pynative": also what compiles itself, by MindSpore's own switch."""
    before = ms.get_context("mode")
    ms.set_context(mode=MODES[mode])
    try:
        with pytest.MonkeyPatch.context() as patch:
            if mode == "pynative":
                patch.setenv("MS_JIT", "0")
            else:
                patch.delenv("MS_JIT", raising=False)
            yield
    finally:
        ms.set_context(mode=before)


def compiled(function, mode):
    """Return `function` as the mode runs it."""
    return function if mode == "pynative" else ms.jit(function)


def compiled_graphs():
    """How many graphs MindSpore has compiled in this process."""
    return len(ms_compile_cache)


def warned(capfd):
    """What MindSpore warned of, but for functions of a test that two of its cases compile.

    2.7 also warns of checks that it runs while it compiles and then removes.
    """
    return [line for line in capfd.readouterr().err.splitlines()
            if "WARNING" in line.upper() and "CommManager" not in line and "PrimitivePy> require_" not in line
            and not ("has been compiled again" in line and "/tests/" in line)]

"""How a test runs: op by op or compiled."""
from contextlib import contextmanager

import mindspore as ms
import pytest

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

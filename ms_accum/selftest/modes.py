"""Run MindSpore compiled or op by op, and recover it after an error."""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from unittest.mock import patch

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

# "jit": a jitted function in MindSpore's default context. "graph": everything in GRAPH_MODE. "pynative": op by op.
MODES = {"jit": ms.PYNATIVE_MODE, "graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
_sizes = count(3)


@contextmanager
def running(mode: str) -> Iterator[None]:
    """Run the block in one of MODES. In "pynative", MindSpore's own switch also runs jitted functions op by op."""
    before = ms.get_context("mode")
    ms.set_context(mode=MODES[mode])
    try:
        with patch.dict(os.environ, MS_JIT="0" if mode == "pynative" else "1"):
            yield
    finally:
        ms.set_context(mode=before)


def recover() -> None:
    """Compile a small new graph: after an error, MindSpore 2.10 may fail to compile the next graph (only that)."""
    size = next(_sizes)
    with suppress(RuntimeError), running("jit"):
        ms.jit(ms.grad(_gathered))(Tensor(np.ones((1, size), np.float32)), Tensor(np.zeros((1, size), np.int64)))


def _gathered(values: Tensor, index: Tensor) -> Tensor:
    return ops.gather_d(values, -1, index).sum()

"""How a test runs: op by op or compiled; what MindSpore compiled and said of it; and what was warned of."""
import re
import warnings
from contextlib import contextmanager

import mindspore as ms

from ms_accum.selftest.modes import MODES as MODES
from ms_accum.selftest.modes import running as running

try:
    from mindspore.graph.api import ms_compile_cache
except ImportError:  # MindSpore 2.8 and older
    from mindspore.common.api import ms_compile_cache

# A warning of how long something took. MindSpore's analyser names the node of a function that it evaluated for long.
SLOW = re.compile(r"\b(time|slow|long|seconds?)\b|\] ANALYZER\((?!.*eliminated).*\{\[0\]: ValueNode<FuncGraph>",
                  re.IGNORECASE)


def compiled(function, mode):
    """Return `function` as the mode runs it."""
    return function if mode == "pynative" else ms.jit(function)


def compiled_graphs():
    """How many graphs MindSpore has compiled in this process."""
    return len(ms_compile_cache)


def warned(capfd):
    """What MindSpore warned of, but for functions of a test that two of its cases compile.

    2.7 also warns of checks that it runs while it compiles and then removes. What is slow says nothing: it may be the
    machine.
    """
    return [line for line in capfd.readouterr().err.splitlines()
            if "WARNING" in line.upper() and "CommManager" not in line and "PrimitivePy> require_" not in line
            and not ("/tests/" in line if "has been compiled again" in line else SLOW.search(line))]


@contextmanager
def recorded_warnings():
    """Record all warnings but those of windows that earlier tests have left open, which come at any moment."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "a window of .* is lost")
        yield caught

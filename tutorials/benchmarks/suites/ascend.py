"""Peak memory of a window on Ascend, in a dry run: MindSpore compiles graphs and plans memory, and runs no kernel."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from case import Case
from harness import Group, Suite, ask_fresh
from workers import say

CONTESTANTS = ("undivided", "tutorial", "boost", "parallel-nn", "ms_accum", "ms_accum-pieces")
# What it is when all gradients wait for each other.
CONTROL = "one-buffer"
STAND_INS = Path(__file__).parents[3] / "tests" / "support" / "ascend" / "stand_ins.py"


def groups(quick: bool, scratch: Path) -> list[Group]:
    """Windows of 8 microbatches, float32, Adam.

    The undivided batch, `parallel.nn` and "ms_accum-pieces" get the window as one batch; the latter two cut it in 8.
    """
    needed = environment(scratch)
    os.environ.update(needed)
    sys.path += needed.get("PYTHONPATH", "").split(os.pathsep)  # a worker gets this process's path
    networks = [
        ("MLP", "mlp-784-512-512-10", 2048), ("CNN", "cnn-64x2", 32), ("ViT", "vit-192x6", 64),
        # Wide and of few blocks: each block takes time to compile, and adds nothing to figures for each parameter.
        ("transformer, 10 M", "transformer-384x6", 64), ("transformer, 350 M", "transformer-2048x7", 96)]
    found = []
    for label, network, size in networks[:1 if quick else None]:
        names = (*CONTESTANTS, CONTROL) if label == "MLP" else CONTESTANTS
        sizes = (1, size, size * 3 // 2, size * 2)
        found.append(Group(label, Case(network, 1, 8, optimizer="Adam"), names, sizes=sizes))
    return found


def environment(scratch: Path) -> dict[str, str]:
    """What a worker's environment needs: an installed CANN's, or that of stand-ins for it, built in `scratch`.

    Raises ValueError where there is neither.
    """
    dry = {"MS_SIMULATION_LEVEL": "1", "RANK_SIZE": "1", "RANK_ID": "0", "MS_ACCUM_IN_PLACE": "1"}
    if os.environ.get("ASCEND_TOOLKIT_HOME"):
        return dry
    if find_spec("mindspore") is None:
        raise ValueError("suite ascend needs the package mindspore")
    needs = "suite ascend needs CANN (ASCEND_TOOLKIT_HOME is not set), or"
    if not STAND_INS.exists():
        raise ValueError(f"{needs} a checkout with tests/support/ascend/stand_ins.py")
    sys.path.append(str(STAND_INS.parent))
    import stand_ins

    if reason := stand_ins.missing():
        raise ValueError(f"{needs} stand-ins for it: {reason}")
    try:
        cann = stand_ins.build(scratch / "stand_ins")
    except subprocess.CalledProcessError as error:
        said = (error.stderr or str(error)).splitlines()[-1]
        raise ValueError(f"suite ascend: stand-ins for CANN were not built: {said}") from error
    return {**dry, **stand_ins.variables(cann)}


def measure(groups: list[Group], rounds: int, scratch: Path) -> Iterator[dict]:
    """Records of what a window takes. The figures are exact: more rounds would give the same.

    A process for each size, as a compiled graph keeps its constants. One at a time, as a network may take half of this
    machine's memory.
    """
    for i, group in enumerate(groups):
        found: dict[str, dict] = {name: {} for name in group.contestants}
        for name in group.contestants:
            say(f"{group.name}: {name}")
            answers = {}
            for size in group.sizes:
                if "message" not in found[name]:
                    answers[size] = ask_fresh(group, name, scratch / f"{i}-{name}-{size}", found, "plan", batch=size)
            if "message" not in found[name]:
                peaks = {size: answer["peak"] for size, answer in answers.items()}
                parameters = answers[group.sizes[0]]["parameters"]
                found[name].update(status="measured", parameters=parameters, peaks=peaks,
                                   **figures(peaks, parameters, group.case.accumulate_step))
        yield group.record(found)


def figures(peaks: dict[int, int], parameters: int, microbatches: int) -> dict[str, float]:
    """What peak memory is made of, for "what fits?".

    A window with n samples needs `per_parameter * parameters` bytes at least, and `held * parameters + per_sample * n`
    where activations outweigh gradients. Held are the gradients, too, that are there when activations are at their
    peak. `deviation`: how far that line misses a size between its two ends, relative.

    Args:
        peaks: Bytes at the peak of a window, by samples in a microbatch: the smallest, and three on the line.
        parameters: How many the network has.
        microbatches: In a window.
    """
    smallest, low, middle, high = sorted(peaks)
    per_sample = (peaks[high] - peaks[low]) / (high - low) / microbatches
    held = peaks[low] - per_sample * low * microbatches
    expected = held + per_sample * middle * microbatches
    return {"per_parameter": peaks[smallest] / parameters, "held": held / parameters, "per_sample": per_sample,
            "deviation": abs(peaks[middle] / expected - 1)}


SUITE = Suite(
    "peak memory on Ascend in a dry run, on any Linux machine", groups, rounds=1, measure=measure)

"""A dry run of MindSpore's Ascend backend: it compiles graphs and plans their memory, and launches no kernel."""
from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

STAND_INS = Path(__file__).parents[2] / "tests" / "ascend" / "stand_ins.py"


def environment(scratch: Path) -> dict[str, str]:
    """What a worker's environment needs: that of an installed CANN, or of stand-ins for its libraries, built in `scratch`.

    Raises ValueError where there is neither.
    """
    dry = {"MS_SIMULATION_LEVEL": "1", "RANK_SIZE": "1", "RANK_ID": "0"}
    if os.environ.get("ASCEND_TOOLKIT_HOME"):
        return dry
    if find_spec("mindspore") is None:
        raise ValueError("suite ascend needs the package mindspore")
    if not STAND_INS.exists():
        raise ValueError("suite ascend needs CANN (ASCEND_TOOLKIT_HOME is not set), or a checkout with tests/ascend/stand_ins.py")
    spec = spec_from_file_location("stand_ins", STAND_INS)
    stand_ins = module_from_spec(spec)
    spec.loader.exec_module(stand_ins)
    if reason := stand_ins.missing():
        raise ValueError(f"suite ascend needs CANN (ASCEND_TOOLKIT_HOME is not set) or stand-ins for it: {reason}")
    try:
        cann = stand_ins.build(scratch / "stand_ins")
    except subprocess.CalledProcessError as error:
        raise ValueError(f"suite ascend: stand-ins for CANN were not built: {(error.stderr or str(error)).splitlines()[-1]}") from error
    path = os.pathsep.join(filter(None, (str(cann / "python"), os.environ.get("PYTHONPATH"))))
    return {**dry, "LD_LIBRARY_PATH": str(cann / "lib64"), "ASCEND_HOME_PATH": str(cann), "ASCEND_TOOLKIT_HOME": str(cann),
            "ASCEND_OPP_PATH": str(cann / "opp"), "PYTHONPATH": path}


def figures(peaks: dict[int, int], parameters: int, microbatches: int) -> dict[str, float]:
    """What peak memory is made of, for "what fits?".

    A window with n samples needs `per_parameter * parameters` bytes at least, and `held * parameters + per_sample * n` where
    activations outweigh gradients. Held are the gradients, too, that are there when activations are at their peak.
    `deviation`: how far that line misses a size between its two ends, relative.

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

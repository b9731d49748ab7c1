"""Run scripts, each in a folder beside it: `run_blocks.py FILE...`. A block of a script ends with `ended()`.

The folder holds only `tutorials`, as the root of a clone does, and `mnist`, as the folder of the notebooks does.
The last line is JSON: what each block printed, and how many figures it drew. From files, because graph mode reads the
source of functions.
"""
import io
import json
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import mindspore as ms

TUTORIALS = Path(__file__).parents[2] / "tutorials"


def state():
    return dict(os.environ), ms.get_context("mode"), ms.get_context("device_target"), ms.get_seed()


def run(path, folder):
    """Run a script in a folder. Return what each block printed, and how many figures it drew."""
    blocks = []

    def ended():
        drawing = sys.modules.get("matplotlib.pyplot")
        blocks.append((out.getvalue(), len(drawing.get_fignums()) if drawing else 0))
        out.seek(0)
        out.truncate()
        if drawing:
            drawing.close("all")

    os.chdir(folder)
    sys.path.insert(0, str(folder))
    ms.set_context(mode=ms.PYNATIVE_MODE)
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(path), {"ended": ended}, run_name=path.stem)
    sys.path.remove(str(folder))
    return blocks


def folder_beside(path):
    folder = path.with_suffix("")
    folder.mkdir()
    (folder / "tutorials").symlink_to(TUTORIALS)
    (folder / "mnist").symlink_to(TUTORIALS / "mnist")
    return folder


if __name__ == "__main__":
    os.environ.pop("MS_DEV_HOST_BLOCKING_RUN", None)
    before = state()
    import ms_accum

    unchanged = state() == before
    ms_accum.avoid_busy_waiting()
    printed = {path.stem: run(path, folder_beside(path)) for path in map(Path, sys.argv[1:])}
    print(json.dumps({"unchanged": unchanged, "file": ms_accum.__file__, "printed": printed}))

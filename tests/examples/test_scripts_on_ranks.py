"""The scripts of tutorials on two ranks, against one process with windows twice as long."""
from pathlib import Path

import numpy as np
import pytest
from support import tiny
from support.rank_cases import LM, every
from support.scripts import run, saved

pytest_plugins = ["support.launch"]


@every("compare")
def test_two_ranks_train_digits_as_one_process(left_by, launch, case):
    """13 and 12 microbatches, with and without ZeRO; in float32, and with ReLU. Only rank 0 has the log."""
    (difference, losses), (same, nothing) = left_by(case, launch)
    assert 0 < difference == same < 1e-3
    assert (len(losses), nothing) == (14, [])
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_two_ranks_train_a_language_model_as_one_process(folder_of):
    """Control: another length of the window does not end there."""
    ranks = folder_of("scripts")
    Path("text").write_bytes(tiny.text(100))
    one, wrong = (run("lm", *LM, "--accumulate-step", length, "--save", f"{length}.safetensors") for length in "42")
    log = (ranks / "logs" / "worker_0.log").read_text(encoding="utf-8")
    ended = [np.frombuffer(saved(path)["network.head.weight"], np.float32)
             for path in (ranks / "lm" / "run.safetensors", "4.safetensors", "2.safetensors")]
    off = [np.abs(ended[0] - other).max() for other in ended[1:]]
    assert off[0] < 1e-3 < off[1], off
    printed = [[line for line in said.splitlines() if "validation" in line] for said in (log, one, wrong)]
    assert printed[0][-2:] == printed[1] != printed[2]

"""The scripts of tutorials on two ranks, against one process with windows twice as long."""
import re
from pathlib import Path

import numpy as np
import pytest
from support import tiny
from support.rank_cases import LM, every
from support.scripts import run_here, saved

pytest_plugins = ["support.launch"]


@every("compare")
def test_two_ranks_train_digits_as_one_process(left_by, launch, case):
    """13 and 12 microbatches, with and without ZeRO; in float32, and with ReLU. Only rank 0 has the log."""
    (difference, losses), (same, nothing) = left_by(case, launch)
    assert 0 < difference == same < 1e-4
    assert (len(losses), nothing) == (14, [])
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_two_ranks_train_a_language_model_as_one_process(folder_of, uncompiled, capsys):
    """Control: another length of the window does not end there."""
    ranks = folder_of("scripts")
    Path("text").write_bytes(tiny.text(100))
    said, ended = [], [ranks / "lm" / "run.safetensors"]
    for length in "42":
        run_here("lm", *LM, "--accumulate-step", length, "--save", f"{length}.safetensors")
        said.append(re.findall("validation .*", capsys.readouterr().out))
        ended.append(f"{length}.safetensors")
    same, one, wrong = (np.frombuffer(saved(path)["head.weight"], np.float32) for path in ended)
    assert np.abs(same - one).max() < 1e-3 < np.abs(same - wrong).max()
    log = (ranks / "logs" / "worker_0.log").read_text(encoding="utf-8")
    bits = [[float(line.split()[1]) for line in lines] for lines in (re.findall("validation .*", log), *said)]
    assert bits[0] == pytest.approx(bits[1], abs=1e-3) != bits[2]

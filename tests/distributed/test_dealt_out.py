"""Checkpoints on another number of ranks, in real processes: from four and one to two (and four), and from these to one."""
import json

import dealing
import numpy as np
import pytest
import reference
from conftest import MLP, difference, tensors, values
from rank_cases import LAUNCHES, MNIST_SHORT, cases_of, every_launch_of

from ms_accum import load_checkpoint
from ms_accum.cli import main as cli

pytest_plugins = ["launch"]


def updated(*windows):
    """The oracle's parameters after an update with all rows of each window as one batch."""
    oracle = reference.Accumulation(values(MLP(seed=0).trainable_params()), reference.SGD(0.1), 1, "mean", 0.5)
    for rows in filter(None, windows):
        x, y = map(np.concatenate, zip(*rows))
        oracle(reference.loss_and_gradients(oracle.parameters, x, y)[1])
    return oracle.parameters


@every_launch_of("dealt_out")
def test_a_window_of_other_ranks_goes_on(left_by, folder_of, launch):
    """The first update is that of the undivided batch of all that was in the window and of what came after.

    A rank whose share is full makes the update before it adds the next microbatch, or, without data, in its flush.
    """
    ranks = LAUNCHES[launch][0]
    for case in cases_of(launch, "dealt_out"):
        sync, left = case.split(":")[1], left_by(case, launch)
        saved = {"four": dealing.rows_of_all(sync), **{f"one, {done}": dealing.rows_of_one(done) for done in (6, 7)}}
        assert ranks == 4 or "four" in left[0]["updated"]
        for name in left[0]["updated"]:
            length, after, others = (16 if name == "four" else 8) // ranks, [], []
            for rank, found in enumerate(each["updated"][name] for each in left):
                missing = length - found["start"]
                after += dealing.rows_after(rank, missing)
                others += [] if missing else dealing.after_full(rank)
            for found in (each["updated"][name] for each in left):
                parameters = list(map(np.array, found["parameters"]))
                assert found["counters"] == [2 if others else 1, 0, 0], (case, name)
                assert difference(parameters, updated([*saved[name], *after], others)) <= 1e-6, (case, name)
                assert difference(parameters, updated(after, others)) > 1e-4, "control"
                assert found["flushed"] == bool(others), (case, name)


@every_launch_of("dealt_out")
def test_what_ranks_cannot_share_is_refused(left_by, launch):
    ranks = LAUNCHES[launch][0]
    for case in cases_of(launch, "dealt_out"):
        sync = case.split(":")[1]
        for said in (each["said"] for each in left_by(case, launch)):
            together = {"microbatch": ranks, "shard": ranks, "window": 1}.get(sync, ranks // 2)
            for done in (6, 7):
                if done % together == 0:
                    assert said[str(done)] == "accepted"
                else:
                    assert (f"the open window holds {done} microbatches, which cannot be dealt out to {together} ranks"
                            in said[str(done)]), case
            if ranks == 2:
                assert "was saved with accumulate_step 4 on 4 ranks, but this run has 3 on 2; give accumulate_step=8, so" in said["length"]


@every_launch_of("dealt_out")
def test_one_process_goes_on_with_what_ranks_left(left_by, folder_of, launch, monkeypatch):
    monkeypatch.setenv("MS_JIT", "0")
    ranks = LAUNCHES[launch][0]
    for case in cases_of(launch, "dealt_out"):
        left_by(case, launch)
        network, acc, step = dealing.build(4 * ranks, seed=9)
        assert load_checkpoint(folder_of(launch) / f"dealt-{case.split(':')[1]}.ckpt", network, acc) == 0
        assert int(acc.mini_step) == 2 * ranks
        more = dealing.rows_after(7, 2 * ranks)
        for x, y in more:
            step(*tensors(x, y))
        assert int(acc.update_step) == 1
        rows = [batch for rank in range(ranks) for batch in dealing.rows_of(rank, 2)]
        assert difference(values(network.trainable_params()), updated([*rows, *more])) <= 1e-6, case


def test_mnist_goes_on_with_another_number_of_ranks(left_by, folder_of, tmp_path, capsys):
    """From one process to two, where a rank's window is full already, and from two to one: the same digits and updates."""
    for left, expected in zip(left_by("mnist_dealt_out"), (["stopped after 7", 0, "stopped after 7"], [0, "stopped after 7"])):
        assert left == expected
    assert "0 epochs and 7 microbatches done" in (folder_of("fast") / "logs" / "worker_0.log").read_text(encoding="utf-8")
    folder = folder_of("fast") / "mnist-dealt-out"
    options = ["mnist", *MNIST_SHORT, "--mode", "pynative", "--accumulate-step", "8"]
    assert cli.main([*options, "--json", "whole.json"]) == 0
    capsys.readouterr()
    assert cli.main([*options, "--resume", str(folder / "two.ckpt"), "--json", "resumed.json"]) == 0
    assert "0 epochs and 14 microbatches done" in capsys.readouterr().out
    whole = json.loads((tmp_path / "whole.json").read_text(encoding="utf-8"))
    for path in (folder / "resumed.json", tmp_path / "resumed.json"):
        resumed = json.loads(path.read_text(encoding="utf-8"))
        assert resumed["update_step"] == whole["update_step"] == 4
        assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-5)
        assert resumed["accuracy"] == pytest.approx(whole["accuracy"], abs=0.05)
    assert cli.main([*options[:-1], "4", "--resume", str(folder / "two.ckpt")]) == 1
    assert "was saved with accumulate_step 4 on 2 ranks, but this run has 4 on 1; give accumulate_step=8, so" in capsys.readouterr().err

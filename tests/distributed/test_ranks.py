"""Ranks as a whole: which are refused, what they save and print, and how a run of them ends."""
import json
import re
from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest
from conftest import MLP, difference, values
from mindspore import nn
from rank_cases import LAUNCHES, MNIST, N, cases_of, every_launch_of, microbatches

from ms_accum import Accumulator, DataParallel
from ms_accum.cli import main as cli
from ms_accum.cli import reference as command
from ms_accum.mnist.network import Network

pytest_plugins = ["launch"]
DIFFER = "ValueError: rank 1 and rank 0 differ in "
OTHER_RANK = "rank 1 failed, and so nothing was done on this one; see its message"


def test_ranks_that_are_not_alike_are_refused(left_by):
    for said in left_by("refusals"):
        assert said["rate"].startswith(DIFFER + "the optimizer, its learning rate or state; ")
        assert said["loss_scaler"] == DIFFER + "the loss_scaler; give every rank the same one"
        assert said["accumulate_step"] == DIFFER + "accumulate_step; give every rank the same network and arguments"
        assert said["seed"].startswith(DIFFER + "the values of first.weight, the values of first.bias, ")
        assert said["seed"].endswith("give every rank the same seed, or broadcast=True")
        assert said["alike"] == "accepted"
        assert said["nodes"].startswith("ValueError: 2 ranks make no whole number of nodes of 3; start as many ranks on each host")
        assert said["started"] == DIFFER + "the number of ranks on their host; start as many ranks on each host, or give ranks_per_node"
        assert said["hosts"].startswith(DIFFER + "the reducer; ")
        assert said["every"] == said["reducer"] == DIFFER + "the reducer; give every rank the same network and arguments"
        assert said["micro_size"].startswith(
            "ValueError: got micro_size=2 with an accumulator whose ranks exchange each microbatch")


def test_an_accumulator_before_init_is_refused(monkeypatch):
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    message = r"msrun started several ranks, .* call mindspore.communication\.init\(\) first"
    with pytest.raises(RuntimeError, match=message):
        Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, reducer=DataParallel())


def test_graphs_compiled_before_follow_rank_0(left_by):
    for left in left_by("compiled_before:jit"):
        assert left["seen"] == left["expected"]


@every_launch_of("resume")
def test_each_rank_resumes_bit_identically(left_by, launch):
    """In mid-window. If one rank cannot save, none does and nothing is left; if one file is damaged, none is loaded."""
    for rank, left in (each for case in cases_of(launch, "resume") for each in enumerate(left_by(case, launch))):
        assert left["unsaved"].startswith("TypeError: " if rank == 1 else "OSError: ")
        assert left["files"] == LAUNCHES[launch][0]
        assert left["mini_step"] == 1
        assert left["extra"] == {"rank": rank}
        assert left["same"]
        assert left["untouched"]
        if rank == 1:
            assert "is truncated" in left["damaged"] or "is damaged" in left["damaged"]
        else:
            assert left["damaged"] == f"CheckpointError: {OTHER_RANK}"
        assert (left["unnamed"].split(":")[0], left["left"]) == ("OSError" if rank else "IsADirectoryError", [])
        assert "restore both from one copy" in left["swapped"] if rank == 1 else left["swapped"] == left["damaged"]


def test_the_first_generation_is_removed(folder_of):
    assert len(list(folder_of("fast").glob("resume-window.*"))) == 2


# --- callbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["window", "microbatch"])
def test_callbacks_where_ranks_have_uneven_data(left_by, sync):
    """Rank 1 has 3 microbatches of 5: its flush takes part in the windows that rank 0 fills, and it logs its own."""
    for rank, left in enumerate(left_by(f"logged:{sync}")):
        sizes = [len(x) for x, _ in microbatches("uneven", rank)]
        assert len(left["losses"]) == len(sizes) == 5 - 2 * rank
        own = [slice(start, start + N) for start in range(0, len(sizes), N)]
        expected = [[part.start + len(sizes[part]), i + 1, np.average(left["losses"][part], weights=sizes[part]), sum(sizes[part])]
                    for i, part in enumerate(own)]
        rows = np.array(left["rows"], float)
        if sync == "window":
            np.testing.assert_allclose(rows, expected, rtol=1e-5)
        else:  # weights are sums
            np.testing.assert_array_equal(rows[:, :2], np.array(expected)[:, :2])
            assert np.isnan(rows[:, 3]).tolist() == [False, rank == 1, False][:len(expected)]
        refused = [said for said in left["said"] if said != "accepted"]
        assert len(refused) == rank
        assert all(said.startswith("RuntimeError: the learning rate was changed after 2 updates, which this rank made") for said in refused)


# --- ms-accum mnist ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("launch", "case"), [
    ("fast", "mnist"), pytest.param("compiled", "mnist:jit", marks=pytest.mark.slow)])
def test_mnist_on_two_ranks_is_one_process_with_windows_twice_as_long(left_by, folder_of, tmp_path, launch, case):
    """Sharded digits (13 and 12 microbatches), the same update; only rank 0 prints, with checkpoints on the way."""
    assert cli.main(["mnist", *MNIST, "--mode", "pynative", "--accumulate-step", "4"]) == 0
    assert left_by(case, launch) == [0, 0]
    folders = [folder_of(launch) / "mnist", tmp_path]
    two, one = (json.loads((folder / "run.json").read_text(encoding="utf-8")) for folder in folders)
    assert (two["ranks"], one["ranks"]) == (2, 1)
    assert two["update_step"] == one["update_step"] == 14
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["accuracy"] == pytest.approx(one["accuracy"], abs=0.2)
    names = [p.name for p in Network(0).trainable_params()]
    trained = [ms.load_checkpoint(str(folder / "run.ckpt")) for folder in folders]
    one, two = (values(parameters[name] for name in names) for parameters in trained)
    assert difference(one, two) <= 1e-3  # float32, and ReLU
    logs = logs_of(folder_of(launch), 2)
    assert ["epoch 2/2  loss" in log for log in logs] == [True, False]
    assert "400 x 2 x 2 ranks = 1,600 digits an update, gradients exchanged each window" in logs[0]
    assert sorted(re.sub("-[0-9a-f]{16}", "", path.name) for path in folders[0].glob("*run.*")) == [
        "run.ckpt", "run.json", "run.rank1of2.ckpt"]


@pytest.mark.parametrize(("options", "message"), [
    (["--shard"], "argument --shard: requires --sync microbatch or node, because a rank keeps whole gradients until"),
    (["--sync", "microbatch", "--micro-size", "2"], "argument --micro-size: ranks that exchange each microbatch cannot cut it"),
    (["--sync", "node", "--micro-size", "2"], "argument --micro-size: ranks that exchange each microbatch cannot cut it; leave out"),
    (["--ranks-per-node", "2"], "argument --ranks-per-node: requires --sync node"),
])
def test_mnist_refuses_what_ranks_cannot_do(options, message, capsys):
    assert cli.main(["mnist", *options]) == 2
    assert message in capsys.readouterr().err


def test_comparing_on_ranks_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(command, "join_ranks", lambda settings: replace(settings, ranks=2))
    assert cli.main(["mnist", "--compare"]) == 2
    assert "argument --compare: cannot be used with several ranks" in capsys.readouterr().err


# --- how a run of ranks ends ------------------------------------------------------------------------------------------


def logs_of(folder, count):
    logs = [(folder / "logs" / f"worker_{rank}.log").read_text(encoding="utf-8") for rank in range(count)]
    assert [line for log in logs for line in log.splitlines() if "eliminated by mistake" in line] == []
    return logs


def test_a_rank_that_fails_ends_the_run(folder_of):
    """With the error in its log, a line in the log of the other, and nobody left behind."""
    end = json.loads((folder_of("fast") / "end.json").read_text(encoding="utf-8"))
    assert end["status"] not in (0, None)
    logs = logs_of(folder_of("fast"), 2)
    assert "train.py: error: rank 1 (host 127.0.0.1) has failed (ValueError), see its log; start again" in logs[0].splitlines()
    assert "ValueError: no more digits" in logs[1]
    assert re.search(r"Worker process \d+ exit with exception", end["output"]), end
    assert end["alive"] == []


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["compiled", "compiled-state", "four"])
def test_ranks_end_together(folder_of, launch):
    end = json.loads((folder_of(launch) / "end.json").read_text(encoding="utf-8"))
    assert (end["status"], end["alive"]) == (0, []), end

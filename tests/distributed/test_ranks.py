"""Ranks as a whole: which are refused, what they save and print, and how a run of them ends."""
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import nn
from support import reference
from support.rank_cases import LAUNCHES, dealt_out, every, microbatches, said_by, step_of, train

from ms_accum import Accumulator, DataParallel, load_checkpoint
from ms_accum.distributed.ranks import raise_if_left_alone
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, mean_loss, tensors
from ms_accum.steps.errors import explain

pytest_plugins = ["support.launch"]
DIFFER = "ValueError: rank 1 and rank 0 differ in "
OTHER_RANK = "rank 1 failed; see its message"


ALIKE = "; give every rank the same network and arguments$"
# What differs in one thing is named by it alone.
NAMED = {
    "compare": "compare= of DataParallel", "stage of ZeRO": "zero= of DataParallel",
    "stages of ZeRO": "sync= of DataParallel, zero= of DataParallel",
    "slices": "whether the optimizer holds the slices of shard_parameters, .*", "accumulate_step": "accumulate_step",
    "hosts": "ranks_per_node= of DataParallel", "rate": "the optimizer's learning_rate",
    "schedule": "the optimizer's learning_rate", "decay": "the optimizer's weight_decay",
    "decays": "the optimizer's weight_decay", "groups": "the optimizer's params, the optimizer's weight_decay.*",
    "beta": "the optimizer's beta1", "nesterov": "the optimizer's nesterov.*", "class": "the optimizer's class, .*",
    "shapes": r"parameters \(names, shapes, dtypes\), the optimizer's accum, the optimizer's stat",
    "scale": "loss_scaler", "scaler": "loss_scaler", "max_skips": "max_skips",
    "buffer_dtype": "buffer_dtype", "stage": "stages", "limit": "stages", "pieces": "pieces", "weight_fn": "weight_fn",
    "sums": "loss_reduction", "aux": "has_aux", "axis": "batch_axis", "cell": "batch_axis",
    "kind": "the kind of step, .*", "cached": "pieces"}
REFUSALS = {
    **{name: f"{DIFFER}{what}{ALIKE}" for name, what in NAMED.items()},
    **dict.fromkeys((
        "alike", "all alike", "step alike", "cell alike", "cached alike", "rate alike", "bucket alike"), "accepted$"),
    "seed": DIFFER + "the values of first.weight, the .*; give every rank the same seed, or broadcast=True",
    "nodes": "ValueError: 2 ranks cannot be divided into nodes of 3; start as many ranks on each host",
    "started": DIFFER + "the number of ranks on their host; start as many ranks on each host, or give ranks_per_node",
    "alone": "UserWarning: this run has 2 ranks, but this accumulator has no reducer"}


def test_ranks_that_are_not_alike_are_refused(left_by):
    for said in left_by("refusals"):
        assert said.keys() == REFUSALS.keys()
        for name, message in REFUSALS.items():
            assert re.match(message, said[name]), said[name]


def test_parameters_that_differ_in_a_bit_are_named(left_by):
    """Also one of bfloat16. Controls: equal ones, and an equal one of those."""
    for equal, differ, first in left_by("apart"):
        assert equal == first == "accepted"
        assert re.match("RuntimeError: rank 1 and rank 0 differ in the values of second.weight and 1 more, so ", differ)


@every("resumed")
def test_ranks_with_uneven_data_go_on_in_the_middle_of_an_epoch(left_by, launch, case):
    """Bit for bit, from a copy of a file that a later save has replaced. Controls: with all batches again; without
    what the file holds of rank 1."""
    for *off, again, without in left_by(case, launch):
        assert off == [0, 0, 0]
        assert again > 1e-3
        assert without > 1e-3


@every("declared")
def test_ranks_with_declared_shapes_train_as_with_static_ones(left_by, launch, case):
    """By two graphs, as some batches are dicts. Control: without the declaration, more."""
    for left in left_by(case, launch):
        for sync in ("window", "microbatch", "zero1"):
            (many, static), (few, found) = left[f"{sync} static"], left[f"{sync} declared"]
            assert many > few == 2
            assert difference([*map(np.array, found)], [*map(np.array, static)]) < 1e-6


@every("evaluated")
def test_ranks_evaluate_together(left_by, launch, case):
    """With uneven data. Control: the mean of the ranks' means. If one fails, or makes another call, all say so."""
    found = left_by(case, launch)
    network = MLP(seed=0)
    for name, ranks in (("all", (0, 1)), ("again", (0, 1)), ("rank 0", (0,))):
        data = [np.concatenate(column) for column in zip(*(b for rank in ranks for b in microbatches(rank, True)))]
        expected = float(mean_loss(network)(*tensors(*data)))
        assert [abs(of_rank[name] - expected) < 1e-6 for of_rank in found] == [True, True]
    assert abs(np.mean([of_rank["own"] for of_rank in found]) - found[0]["all"]) > 1e-3
    assert [of_rank["held"] for of_rank in found] == [[1, 1], [1, 1]]
    assert all(of_rank["none"].startswith("ValueError: evaluate got no batch") for of_rank in found)
    assert [of_rank["broken"] for of_rank in found] == [f"RuntimeError: {OTHER_RANK}", "OSError: no such file"]
    for of_rank in found:
        assert re.match("RanksDiffer: ranks made different calls, .* rank 1 evaluates with accumulator",
                        of_rank["other"]), of_rank["other"]


@every("stuck")
def test_all_ranks_stop_after_too_many_skipped_windows(left_by, launch, case):
    for windows, said in left_by(case, launch):
        assert windows == 2
        assert re.match("NoProgress: more than max_skips=1 windows in a row", said), said


def test_a_rank_without_data_stops_with_the_others(left_by):
    """In its flush, after as many skips. Else the next exchange would wait for a rank that has stopped."""
    for said in left_by("stuck_in_flush"):
        assert said.startswith("NoProgress: more than max_skips=1 windows in a row were skipped (2 by now, 2 in all)")


def test_ranks_before_init_are_refused(monkeypatch):
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    with pytest.raises(RuntimeError, match=r"msrun started several ranks, .*mindspore\.communication\.init\(\) first"):
        Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, reduction="sum", reducer=DataParallel())


REFUSED_FILES = {  # what rank 0 says, and the others
    "extra": (f"OSError: {OTHER_RANK}", "TypeError: extra cannot be written as JSON"),
    "folder": ("FileNotFoundError: the folder .*nowhere does not exist", "OSError: rank 0 failed"),
    **dict.fromkeys(("saved to", "loaded from"), (
        r"ValueError: the path is \S+another0\.safetensors on rank 0, \S+another1\.safetensors on rank 1.*; give every "
        "rank the same",) * 2),
    "saved others": (DIFFER + "what a checkpoint holds; give every rank the same network",) * 2,
    "loaded others": (f"CheckpointError: {OTHER_RANK}", "CheckpointError: .*frozen is missing in the file"),
    "truncated": ("CheckpointError: .*(is truncated|is damaged)", "CheckpointError: rank 0 failed; see"),
    "written": ("OSError: it was written while it was read", "OSError: rank 0 failed"),
    "torn": ("RuntimeError: an error or an interrupt stopped an update",) * 2, "mended": ("accepted",) * 2}


@every("damaged")
def test_ranks_save_and_load_together(left_by, launch, case):
    """One file, without rests. If one rank cannot save or load, none does, and the old file is left."""
    for rank, left in enumerate(left_by(case, launch)):
        assert left["files"] == [["damaged.safetensors"]] * 4
        assert left["unchanged"]
        assert left["said"].keys() == REFUSED_FILES.keys()
        for name, messages in REFUSED_FILES.items():
            message = OTHER_RANK if rank > 1 and OTHER_RANK in messages[0] else messages[min(rank, 1)]
            assert re.search(message, left["said"][name]), (name, left["said"][name])


@every("other_ranks")
def test_a_closed_window_goes_on_with_another_number_of_ranks(left_by, folder_of, launch, case, uncompiled):
    """From one process to several and back, with the updates of an uninterrupted run. An open window is refused."""
    ranks, sync = LAUNCHES[launch][0], case.split(":")[1]
    refused = (r"CheckpointError: .* was saved in an open window with {} .*; load it with the old settings, train to "
               r"the end of the window or call flush\(\), save, and load that file with the new ones")
    oracle = reference.Undivided(values(MLP(seed=0).trainable_params()), reference.SGD(0.1, 0.9), 8, "mean", 0.5)
    for x, y in dealt_out(ranks):
        oracle((x, y), len(x))
    oracle.flush()
    for said in left_by(case, launch):
        assert said["closed"] == "accepted"
        assert re.match("RuntimeError: the checkpoint was saved in .* with another number of ranks", said["place"])
        assert difference(list(map(np.array, said["parameters"])), oracle.parameters) <= 1e-6
        assert re.match(refused.format("accumulate_step"), said["open"]), said["open"]
    network, step = step_of(None, 8, 1)
    load_checkpoint(folder_of(launch) / f"ranks-{sync}-closed.safetensors", network, step)
    train(step, dealt_out(ranks)[8:])
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-6
    said = said_by(load_checkpoint, folder_of(launch) / f"ranks-{sync}-open.safetensors", *step_of(None, 8 // ranks, 1))
    assert re.match(refused.format("reducer"), said), said


@pytest.mark.parametrize("sync", ["window", "microbatch"])
def test_callbacks_where_ranks_have_uneven_data(left_by, sync):
    """Rank 1 has 4 microbatches of 7: its flush takes part in the windows that rank 0 fills, and it logs its own."""
    for rank, left in enumerate(left_by(f"logged:{sync}")):
        sizes = [len(x) for x, _ in microbatches(rank, uneven=True)]
        assert len(left["losses"]) == len(sizes) == 7 - 3 * rank
        own = [slice(start, start + 2) for start in range(0, len(sizes), 2)]
        means = [np.average(left["losses"][part], weights=sizes[part]) for part in own]
        expected = [[part.start + len(sizes[part]), i + 1, means[i], sum(sizes[part])] for i, part in enumerate(own)]
        rows = np.array(left["rows"], float)
        assert len(rows) == len(expected)
        if sync == "window":
            np.testing.assert_allclose(rows, expected, rtol=1e-5)
        else:
            np.testing.assert_array_equal(rows[:, :2], np.array(expected)[:, :2])
        refused = [said for said in left["said"] if said != "accepted"]
        assert len(refused) == rank
        changed = "RuntimeError: the learning rate was changed after 3 updates that this rank made"
        assert all(said.startswith(changed) for said in refused)


def logs_of(folder, count):
    logs = [(folder / "logs" / f"worker_{rank}.log").read_text(encoding="utf-8") for rank in range(count)]
    assert [line for log in logs for line in log.splitlines() if "eliminated by mistake" in line] == []
    return logs


@pytest.mark.slow
def test_selftest_on_two_ranks(left_by):
    """Controls: sums of ranks that are halved fail, and no row of a single device; what fails on one rank is named."""
    found, other = left_by("selftest", "others")
    assert {name: status for name, (status, _) in found.items()} == {"whole": 0, "dtypes": 0, "half": 1, "one": 1}
    assert {name: status for name, (status, _) in other.items()} == {"whole": 0, "dtypes": 0, "half": 1, "one": 1}
    (_, whole), (_, dtypes), (_, half), (_, one) = found.values()
    ranks = {f"2 ranks, {sync}" for sync in ("window", "microbatch", "zero 1", "zero 2")}
    assert {row[2] for row in whole} == {"holds"}
    assert {row[0] for row in whole} > ranks
    assert [row[1:3] for row in dtypes] == [["float32", "holds"], ["float16", "holds"], ["bfloat16", "no kernel"]]
    assert {(row[0], row[3]) for row in half if row[2] == "FAILS"} == {(check, "rank 0, 1") for check in ranks}
    assert one == [["token weights, means", "float32", "FAILS", "rank 1: see its output on stderr"]]


def test_a_rank_that_fails_ends_the_run(folder_of):
    """With the error in its log, and nobody left behind."""
    end = json.loads((folder_of("fast") / "end.json").read_text(encoding="utf-8"))
    assert end["status"] not in (0, None)
    assert "ValueError: no more digits" in logs_of(folder_of("fast"), 2)[1]
    assert re.search(r"Worker process \d+ exit with exception", end["output"]), end
    assert end["alive"] == []


ALONE = ("RuntimeError: another rank does not take part in an exchange: it left its epoch early, ended, or is late; "
         "call flush()")


@pytest.mark.slow
def test_a_rank_that_is_left_alone_says_so_in_its_first_line(folder_of):
    said = json.loads((folder_of("left") / "rank0.json").read_text(encoding="utf-8"))["left_alone:jit"]
    assert said.startswith(ALONE)
    assert "Launch kernel failed" in said


def test_only_an_exchange_that_failed_means_that_a_rank_is_missing():
    """The text is MindSpore 2.10's. Control: another kernel's."""
    for name, expected in (("Default/AllReduce-op0", ALONE), ("Default/MatMul-op0", "accepted")):
        error = RuntimeError(f"\n----\n- Kernel error:\n----\nLaunch kernel failed: {name}\n")
        said = said_by(raise_if_left_alone, error)
        assert said.startswith(expected)
        assert (name in said) == (expected is ALONE)
        exchange = SimpleNamespace(require_agreement=int)
        assert said_by(explain, error, None, int, exchange).startswith(ALONE) == (expected is ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["compiled", "four"])
def test_ranks_end_together(folder_of, launch):
    end = json.loads((folder_of(launch) / "end.json").read_text(encoding="utf-8"))
    assert (end["status"], end["alive"]) == (0, []), end

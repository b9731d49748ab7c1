"""Ranks that make different calls: each draw trains as plain MindSpore would, or every rank raises an error."""
import json
import re
import subprocess
from collections import Counter

import numpy as np
import pytest
from support import protocols
from support.launch import msrun
from support.protocols import drawn, expected

pytest_plugins = ["support.launch"]


def launched(folder, ranks, first, count, *options, timeout=60):
    """`[[what each rank found] of each draw]`, and msrun's exit status."""
    command, environment = msrun(folder, ranks, protocols.__file__, first, count, *options)
    done = subprocess.run(command, cwd=folder, env={**environment, "MS_CPU_COMM_OP_TIMEOUT": str(timeout)}, text=True,
                          capture_output=True, timeout=1200, check=False)
    found = []
    for rank in range(ranks):
        path = folder / f"rank{rank}.jsonl"
        found.append(list(map(json.loads, path.read_text(encoding="utf-8").splitlines())) if path.exists() else [])
    return list(zip(*found)), done.returncode


def result_of(draw):
    """"right", "errors", or what is wrong; and whether the draw is legal."""
    mode, programs, is_legal = drawn(draw[0]["number"], len(draw))
    said = [of_rank["said"] for of_rank in draw]
    if any(said):
        return ("errors" if all(said) else "an error on some ranks"), is_legal
    off = [np.abs(np.concatenate(of_rank["parameters"][2 * which:2 * which + 2]) - plain).max()
           for of_rank in draw for which, plain in enumerate(expected(mode, programs))]
    return ("right" if max(off) < 1e-5 else "a difference"), is_legal


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "first", "count"), [
    *((2, first, 100) for first in range(0, 600, 100)), (4, 600, 100)])
def test_each_draw_trains_as_one_process_or_raises_on_every_rank(tmp_path, ranks, first, count):
    """Control: without the comparison of tags, below."""
    found, status = launched(tmp_path, ranks, first, count)
    results = Counter(map(result_of, found))
    assert status == 0
    assert len(found) == count
    assert set(results) <= {("right", True), ("right", False), ("errors", False)}, results
    assert results["right", True] > count // 4
    assert results["errors", False] > count // 12


@pytest.mark.slow
def test_without_tags_ranks_differ_or_wait(tmp_path):
    """Control. Draws that raise on every rank above (12 of the first 60); here some do not."""
    found, status = launched(tmp_path, 2, 0, 60, "untagged", timeout=5)
    results = Counter(result for result, _ in map(result_of, found))
    assert status != 0 or results["a difference"] + results["an error on some ranks"] > 0


DIFFER = "RanksDiffer: ranks made different calls, so nothing was exchanged: "


def test_ranks_that_leave_epochs_early_meet_at_the_same_end(left_by):
    """Control: 12 windows are all; a flush more would join the next epoch (18 updates, 0.07 off)."""
    assert left_by("left_early") == [[pytest.approx(0, abs=1e-6), 12, 12]] * 2


def test_a_flush_after_an_epoch_that_was_left_meets_those_that_have_ended_it(left_by):
    """After an error in its first batch. Controls: the epochs before and after, where all flush."""
    assert left_by("left_by_an_error") == [pytest.approx(0, abs=1e-6)] * 2


def test_a_rank_that_evaluates_alone_is_named_at_once(left_by):
    """Where each microbatch is a window: before the next exchange."""
    for said in left_by("evaluated_alone"):
        assert re.match(DIFFER + "rank 0 evaluates with accumulator .*; rank 1 trains accumulator", said)


def test_all_ranks_save_after_the_same_update(left_by):
    (saved, same, updates), other = left_by("saved_on_update")
    assert other == [saved, same, updates]
    assert saved == list(range(2, updates + 1, 2)) != []
    assert same


def test_calls_that_only_some_ranks_make_raise_on_every_rank(left_by):
    """Both sides are named. Control: after the ranks have loaded, they go on."""
    for said in left_by("unmatched"):
        assert re.match(DIFFER + "rank 0 saves a checkpoint of accumulator .*; rank 1 flushes accumulator",
                        said["only_rank_0_saves"])
        assert re.match(DIFFER + "rank 0 (trains|saves) .*; rank 1 (flushes|saves) ", said["saved_by_own_count"])
        assert re.match(DIFFER + "rank 0 .* in round 0; rank 1 trains accumulator .* in round 1",
                        said["left_without_flush"])
        assert re.match("RuntimeError: rank 1 and rank 0 differ in the values of first.weight and 3 more, so the ranks "
                        "made different updates", said["rates_apart"])
        assert said["go_on"] == "accepted"


def test_ranks_that_disagreed_go_on_with_a_new_step(left_by):
    """And name its first parameter. Controls: the old one does not go on, until all ranks load; where ranks sum each
    microbatch, they have to start again."""
    for said, off, again, loaded, begun in left_by("built_again"):
        assert re.match(DIFFER + r"rank 0 trains accumulator (\d+) in round 0; rank 1 builds accumulator (\d+), or .* "
                        r"\(accumulators are counted as they are built: \1 is that of first.weight\);.*, or build a "
                        "new train step or accumulator, on all ranks to go on$", said)
        assert off < 1e-6
        assert again == said
        assert loaded == "accepted"
        assert begun.endswith("gradients: start the processes again, from a checkpoint")


@pytest.mark.slow
def test_a_rank_that_drops_its_window_is_noticed_where_each_microbatch_is_summed(folder_of):
    """Control: without the reset. The kernels of rank 1 may wait for rank 0, until msrun ends it."""
    control, said = json.loads((folder_of("reset") / "rank0.json").read_text(encoding="utf-8"))["reset_inside"]
    assert control == "accepted"
    assert re.match(DIFFER + "rank 0 trains accumulator .* in round 0, with 1 microbatches; rank 1 trains", said)


@pytest.mark.slow
def test_two_steps_for_each_batch_need_equal_numbers_of_batches(left_by):
    for uneven, off in left_by("twins", "calls"):
        trained, flushed = re.match(DIFFER + r"rank 0 trains accumulator (\d+) .*; rank 1 flushes accumulator (\d+)",
                                    uneven).groups()
        assert int(trained) == int(flushed) + 1
        assert off < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", ["by_hand", "by_hand:jit"])
def test_by_hand_nothing_is_applied_after_a_disagreement(left_by, case):
    for rank, (at_once, status, moved, again) in enumerate(left_by(case, "calls")):
        assert at_once == ("accepted" if case.endswith("jit") else status)
        assert status.startswith(DIFFER)
        assert not moved
        assert again == status
        assert f"rank {rank} trains" in status


@pytest.mark.slow
def test_another_collective_that_comes_between_is_an_error(folder_of):
    """On the rank whose exchange was mixed; msrun then ends the other."""
    end = json.loads((folder_of("mixed") / "end.json").read_text(encoding="utf-8"))
    logs = "".join(path.read_text(encoding="utf-8") for path in (folder_of("mixed") / "logs").glob("worker_*.log"))
    said = "".join(path.read_text(encoding="utf-8") for path in folder_of("mixed").glob("rank*.json"))
    assert end["alive"] == []
    assert re.search("an exchange of ms_accum was mixed with another collective|RanksDiffer|does not take part",
                     logs + said)


@pytest.mark.slow
@pytest.mark.parametrize("first", [1000, 1001, 1002])
def test_where_ranks_sum_each_microbatch_a_disagreement_ends_the_run(tmp_path, first):
    """A graph goes on after it, so ranks end one after the other; each has an error."""
    found, status = launched(tmp_path, 2, first, 1, "microbatch", timeout=10)
    assert (status, found) == (1, [])

"""Ranks: they train as plain MindSpore does on the data of all, or all of them raise an error that says why."""
import json
import re
from collections import Counter

import numpy as np
import pytest
from support.pages import PAGES, blocks_of
from support.rank_cases import every, four, own_mean

pytest_plugins = ["support.launch"]
KINDS = ["window", "microbatch", "zero1", "zero2"]
AGAIN = "start all ranks again from the last checkpoint$"


@every("drawn")
def test_each_draw_trains_as_one_process_or_raises_on_every_rank(left_by, launch, case):
    """Control: `uncompared`, below."""
    found = left_by(case, launch)
    ranks = [[tuple(result) for result in of_rank.values()] for of_rank in found]
    for number, *results in zip(found[0], *ranks):
        assert len(set(results)) == 1, (number, results)
    results = Counter(ranks[0])
    assert set(results) <= {(True, "right"), (False, "right"), (False, "error")}, dict(zip(found[0], ranks[0]))
    assert results[True, "right"] > len(ranks[0]) // 3
    assert results[False, "error"] > len(ranks[0]) // 8


@pytest.mark.slow
def test_without_a_comparison_of_rows_ranks_differ_or_wait(folder_of):
    """Control."""
    folder = folder_of("uncompared")
    end, path = json.loads((folder / "end.json").read_text(encoding="utf-8")), folder / "rank0.json"
    results = json.loads(path.read_text(encoding="utf-8"))["uncompared"].values() if path.exists() else []
    assert end["status"] or any(result not in ("right", "error") for _, result in results)


OTHERS = {
    "frozen": f"RanksDiffer: rank 1 and rank 0 differ in frozen parameters: 0.weight; .*{AGAIN}",
    "kind": "RanksDiffer: rank 1 and rank 0 differ in the kind of step: rank 0 has make_train_step, rank 1 has Acc",
    "nodes": "ValueError: 2 ranks cannot be divided into nodes of 3; start as many ranks on each host",
    "no slices": r"ValueError: the optimizer's parameters do not fit zero=1; .* shard_parameters\(",
    "slices": "ValueError: the optimizer's parameters do not fit zero=0; .* otherwise, do neither",
    "no reducer": "ValueError: the optimizer's parameters do not fit zero=0; .* otherwise, do neither",
    "Lamb": "ValueError: Lamb may look at whole parameters, .*; give an elementwise optimizer .* or elementwise=True",
    "alone": "UserWarning: this run has 2 ranks, but this accumulator has no reducer"}


def test_the_first_setting_that_differs_is_named(left_by):
    """Control: equal ones."""
    for said in left_by("named"):
        settings = said.pop("settings")
        assert settings.pop("alike") == "accepted"
        for name, text in settings.items():
            assert re.match(f"RanksDiffer: rank 1 and rank 0 differ in {name}: rank 0 has .*; give every rank the same "
                            "network and arguments$", text), name
        assert said.keys() == OTHERS.keys()
        for name, message in OTHERS.items():
            assert re.match(message, said[name]), said[name]


DIFFER = "RanksDiffer: ranks made different calls, so nothing was exchanged: "
CALLS = {
    "leave": f"{DIFFER}rank 0 begins an epoch with .*; rank 1 (closes|adds)",
    "save": f"{DIFFER}rank 0 (closes|adds) .*; rank 1 saves",
    "flush inside": f"{DIFFER}rank 0 ends a flush of .*; rank 1 (closes|adds)|{DIFFER}rank 0 (closes|adds)",
    "state": "RanksDiffer: rank 1 and rank 0 differ in (parameters|state of the optimizer): "}


def test_calls_that_only_some_ranks_make_raise_on_every_rank(left_by):
    """Inside an epoch; `drawn` has others, and is the control."""
    found = left_by("calls")
    for said in found:
        assert list(said) == KINDS
        for kind, of_kind in said.items():
            for name, text in of_kind.items():
                assert re.match(CALLS[name], text), (kind, name, text)
    for kind in KINDS:
        assert found[0][kind] == found[1][kind]


def test_by_hand_a_window_is_closed_on_the_host(left_by):
    """Control: in the graph, a call says that ranks have to meet; and there is no exchange before they do."""
    for found in left_by("by_hand"):
        for off, closed, said, other in found.values():
            assert off < 1e-6
            assert closed == [False, True, False, True]
            assert said.startswith("ValueError: with several ranks, a window is not closed in a graph, because ranks")
            assert other.startswith("ValueError: by hand, ranks meet only where a window closes; give")


@every("values")
def test_ranks_send_values_on_the_host(left_by, launch, case):
    """Bit by bit. What fails on one rank is told to the others; what differs is named."""
    found = left_by(case, launch)
    ranks, first = len(found), found[0]
    for rank, of_rank in enumerate(found):
        assert list(of_rank)[:4] == KINDS
        for kind, left in of_rank.items():
            assert left["gathered"] == [{"rank": other, "more": "x" * other} for other in range(ranks)]
            assert left["joined"] == first["window"]["joined"] == pytest.approx(left["joined"])
            assert left["cut"]
            size, whole = left["sizes"]
            assert size == (-(-whole // ranks) if "zero" in kind else whole)
            assert left["sent"] == np.array([np.nan, -0.0, 0, 2**-140], np.float32).tobytes().hex()
            assert left["half"] == [1.5]
            assert left["together"] == ("OSError: no such file" if rank == 1 else
                                        "KeyError: 'rank 1 failed; see its message'")
            assert left["alike"] == left["equal"] == "accepted"
            assert left["apart"].startswith("RanksDiffer: rank 1 and rank 0 differ in b: rank 0 has 0, rank 1 has 2")


@every("resumed")
def test_ranks_with_uneven_data_go_on_bit_for_bit(left_by, launch, case):
    """Saved after an update, and in an open window, which is trained again."""
    for found in left_by(case, launch):
        assert all(ends == [0, 0] for ends in found.values()), found


def test_zero_divides_state_and_buffers(left_by):
    """By two, but for padding."""
    for found in left_by("held"):
        assert found["window"] == found["microbatch"] == [2, 1]
        for kind, buffers in (("zero1", 1), ("zero2", 0.5)):
            assert found[kind] == [pytest.approx(1, abs=0.1), pytest.approx(buffers, abs=0.1)]


def test_ranks_evaluate_together(left_by):
    """With uneven data. Control: the mean of the ranks' means. If one fails, all say so, and can go on."""
    data = [batch for rank in range(2) for batch in four(rank)[:4 - rank]]
    found = left_by("evaluated")
    for left in found:
        assert left["both"] == left["after"] == pytest.approx(own_mean(data), abs=1e-6)
        assert left["one"] == pytest.approx(own_mean(four(0)), abs=1e-6)
        assert left["none"].startswith("ValueError: evaluate got 0 batches with")
    assert abs(np.mean([left["own"] for left in found]) - found[0]["both"]) > 1e-3
    assert found[0]["broken"] == "RuntimeError: rank 1 failed; see its message"
    assert "rank" not in found[1]["broken"] != "accepted"


@every("optimizers")
def test_every_elementwise_optimizer(left_by, launch, case):
    """With groups and a clipped norm, as without ZeRO. Control: parameters have moved."""
    for found in left_by(case, launch):
        assert len(found) == 13
        for name, (stage_1, stage_2, moved) in found.items():
            assert max(stage_1, stage_2) < 2e-6 < 1e-3 < moved, name


@pytest.mark.slow
def test_a_rank_that_is_left_alone_says_so(folder_of):
    """And that it may be late, which call waits, e.g. for a slow disk, and how to wait longer."""
    said = json.loads((folder_of("left") / "rank1.json").read_text(encoding="utf-8"))["left_alone"]
    assert re.match(r"RanksDiffer: rank 1 saves accumulator 0 \(0.weight\), but another rank does not come: it is "
                    "late, has ended or has failed; .* A slow disk .* MS_CPU_COMM_OP_TIMEOUT", said)


@every("recipes")
def test_recipes_print_on_two_ranks_what_they_print_on_one_device(left_by, launch, case):
    """The first block, or all of them: files that both ranks see, a signal that one of them gets. Rank 0 has logs."""
    blocks = blocks_of(PAGES["recipes"])
    for rank, printed in enumerate(left_by(case, launch)):
        assert len(printed) == min(int(case.partition(":")[2]), len(blocks)) > 0
        for said, block in zip(printed, blocks):
            assert block.agrees(said) or (rank, said) == (1, ""), (block.code, said)


def test_a_rank_that_fails_ends_the_run(folder_of):
    """With the error in its log, and nobody left behind."""
    folder = folder_of("fast")
    end = json.loads((folder / "end.json").read_text(encoding="utf-8"))
    logs = [(folder / "logs" / f"worker_{rank}.log").read_text(encoding="utf-8") for rank in range(2)]
    assert end["status"] not in (0, None)
    assert "ValueError: no more digits" in logs[1]
    assert re.search(r"Worker process \d+ exit with exception", end["output"]), end
    assert end["alive"] == []
    assert not any("eliminated by mistake" in log for log in logs)

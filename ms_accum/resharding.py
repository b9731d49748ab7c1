"""Resharding: the open window of a checkpoint, dealt out to another number of ranks. On NumPy arrays alone.

    saved on 4 ranks                                       resumed on 2
    rank 0: sums, counts ─┐    the whole window:           ┌─ rank 0: the sums, half of the counts
    rank 1: sums, counts ─┼──► sums in one unit of ────────┤
    rank 2: sums, counts ─┤    weights, and counts         └─ rank 1: zeros, half of the counts
    rank 3: sums, counts ─┘

A *party* is the ranks that add up their microbatches together: one rank with `sync="window"`, the ranks of a node, or,
with `sync="microbatch"`, all. Its ranks hold the same sums, or each a part of them.
"""
from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd, isclose
from typing import Optional

import numpy as np

from .arguments import LARGEST_INT32

Arrays = dict[str, np.ndarray]
_OF = "accumulator:"
_SPREAD = f"{_OF}noise_scale.window"
_NUMBER = re.compile(r"(?<!target=)(?<![\w.+-])\d[\d.]*(?:e[+-]?\d+)?(?![\w.:])")  # but no key of a dict


@dataclass(frozen=True)
class Sharing:
    """How the ranks of a run share a window.

    Attributes:
        ranks: How many there are.
        party: How many of them add up their microbatches together; ranks of one party have consecutive numbers.
        buckets: The parameters (by place) whose sums lie in each shard; empty if a rank's sums are whole.
        apart: Whether parties may hold different numbers of microbatches.
        in_first_weight: Whether buffers count in units of a first weight, and not in the user's.
        averages: Whether a window's gradient is divided by the ranks (`reduction="sum"`), and the microbatches' by
            `accumulate_step` in the script.
    """

    ranks: int
    party: int
    buckets: list[list[int]]
    apart: bool = False
    in_first_weight: bool = False
    averages: bool = False

    @property
    def step(self) -> int:
        """The microbatches of a window, of all ranks, are a multiple of this."""
        return self.party if self.apart else self.ranks

    def counts(self, microbatches: int) -> list[int]:
        """Return the microbatches of each party: `microbatches` of all ranks, the first parties have one more."""
        parties = self.ranks // self.party
        return [(microbatches // self.party + parties - 1 - i) // parties for i in range(parties)]


@dataclass
class WholeWindow:
    """The open window of all ranks.

    Attributes:
        shapes: Of the parameters, by name.
        microbatches: Of all ranks.
        sums: By the name of their entry: the buffers, in multiples of `units`, and what else is added over parties.
        units: Of each loss, in the user's unit.
    """

    shapes: dict[str, tuple[int, ...]]
    microbatches: int = 0
    sums: Arrays = field(default_factory=dict)
    units: list[float] = field(default_factory=list)


def gathered(files: Iterable[Arrays], saved: Sharing, shapes: dict[str, tuple[int, ...]],
             losses: int) -> tuple[Arrays, WholeWindow]:
    """Return what rank 0's file holds besides the window, and the window of all files, which come in order of ranks.

    ValueError if ranks do not hold the same parameters: then there is no run to resume.
    """
    window, units = WholeWindow(shapes), [_unit_name(t) for t in range(losses)]
    first: Arrays = {}
    parts: list[Arrays] = []
    for rank, entries in enumerate(files):
        if not first:
            first = entries
        for name in shapes:
            if name in first and first[name].tobytes() != entries[name].tobytes():
                raise ValueError(f"rank {rank} and rank 0 saved different values of {name}")
        if saved.buckets:
            parts = [*parts, {name: entries[name] for name in _shard_names(saved)}][-saved.party:]
        if rank % saved.party == saved.party - 1:
            sums = _joined(parts, saved, shapes) if saved.buckets else entries
            scales = [float(entries[unit]) for unit in units]
            window.units = [known or new for known, new in zip(window.units or scales, scales)]
            window.microbatches += int(entries[f"{_OF}mini_step"]) * saved.party
            for t, (scale, unit) in enumerate(zip(scales, window.units)):
                _add(window.sums, sums, _buffer_names(shapes, t), scale / unit if scale else 1.0)
            _add(window.sums, entries, [f"{_OF}weight_sum", f"{_OF}window_weight", _SPREAD])
    others = {*window.sums, *_shard_names(saved), *units}
    return {name: value for name, value in first.items() if name not in others}, window


def dealt(first: Arrays, window: WholeWindow, saved: Sharing, sharing: Sharing, rank: int) -> Arrays:
    """Return the entries of one rank: the sums go to the first party, and the counts to all.

    Args:
        first, window: As `gathered` returned them.
        saved, sharing: How the saved run and this one share windows.
        rank: The rank of this run.
    """
    party, parties = rank // sharing.party, sharing.ranks // sharing.party
    times = Fraction(saved.ranks, sharing.ranks)
    entries, buffers = dict(first), {}
    for t, unit in enumerate(window.units):
        target = (unit or _mean_weight(window, t)) if sharing.in_first_weight else 0.0
        entries[_unit_name(t)] = np.float32(target)
        factor = (unit or 1.0) / (target or 1.0) * (float(1 / times) if sharing.averages else 1.0)
        for name in _buffer_names(window.shapes, t):
            if name in window.sums:
                total = window.sums[name]
                buffers[name] = total * np.asarray(factor, total.dtype) if party == 0 else np.zeros_like(total)
    entries.update(_cut(buffers, sharing, rank % sharing.party, window.shapes) if sharing.buckets else buffers)
    counts = sharing.counts(window.microbatches)
    entries[f"{_OF}mini_step"] = np.int32(counts[party])
    # Among all that hold microbatches, because a weight may close each party's window.
    holding = np.float32(np.count_nonzero(counts) or parties)
    entries[f"{_OF}weight_sum"] = window.sums[f"{_OF}weight_sum"] / holding * np.float32(counts[party] > 0)
    entries[f"{_OF}window_weight"] = window.sums[f"{_OF}window_weight"] / np.float32(parties)
    if _SPREAD in window.sums:
        entries[_SPREAD] = window.sums[_SPREAD] * (party == 0)
    if f"{_OF}window_chosen" in entries:
        for name in ("window_chosen", "window_length"):  # rounded down; the windows that follow adapt
            entries[_OF + name] = np.int32(int(first[_OF + name]) * times)
        # Means of a window's weight, and of its microbatches on one rank.
        entries[f"{_OF}window_weights"] = first[f"{_OF}window_weights"] * np.array([1, float(times)])
    return entries


def why_not_shared(window: WholeWindow, sharing: Sharing, accumulate_step: str) -> Optional[str]:
    """Return why these ranks cannot hold the open window, and what to do; None if they can.

    `accumulate_step` is this run's, as `Window.describe` gives it.
    """
    if window.microbatches % sharing.step == 0:
        return None
    who = "ranks" if sharing.step == sharing.ranks else "ranks per node"
    fit = _numbers(gcd(_common(accumulate_step) * sharing.ranks, window.microbatches))
    return (f"the open window holds {window.microbatches} microbatches, which cannot be dealt out to {sharing.step} "
            f"{who} that count them together; expected {fit} {who}, or a closed window: save when train_step.updated "
            "is true")


def why_other_lengths(saved: str, ranks: int, now: str, ranks_now: int) -> Optional[str]:
    """Return why windows of two runs differ, all ranks together, and what to give; None if they do not.

    `saved` and `now` are `accumulate_step`s as `Window.describe` gives them, of so many ranks.
    """
    expected = _times(saved, Fraction(ranks, ranks_now))
    given = f"was saved with accumulate_step {saved} on {_ranks(ranks)}, but this run has {now} on {ranks_now}"
    if expected is None:
        fit = _numbers(_common(saved) * ranks)
        return (f"{given}, where a rank's windows would hold parts of microbatches; start {fit} "
                f"rank{'s' * (fit != '1')}")
    if _NUMBER.sub("", expected) == _NUMBER.sub("", now) and all(
            isclose(float(a), float(b), rel_tol=1e-8) for a, b in zip(_NUMBER.findall(expected), _NUMBER.findall(now))):
        return None
    name = "" if expected.startswith("a function") else "accumulate_step="
    return f"{given}; give {name}{expected}, so that an update stands for as many microbatches"


def _times(text: str, times: Fraction) -> Optional[str]:
    """Return the description of windows so many times as long; None if they would hold parts of microbatches."""
    budget = re.match(r"until_weight\(([^,]+)", text)
    parts = False

    def scaled(found: re.Match) -> str:
        nonlocal parts
        number = found[0]
        if budget and found.start() == budget.start(1):
            return f"{float(number) * times:.9g}"
        length = int(number) * times
        if int(number) == LARGEST_INT32:
            return number
        parts = parts or length.denominator > 1
        return str(length)

    scaled_text = _NUMBER.sub(scaled, text)
    return None if parts else scaled_text


def _common(text: str) -> int:
    """Return the greatest common divisor of the lengths in a description; 0 if only a weight closes windows."""
    text = re.sub(r"until_weight\([^,]+", "", text)
    return gcd(*(int(number) for number in _NUMBER.findall(text) if int(number) != LARGEST_INT32))


def _numbers(number: int) -> str:
    """Return the divisors of a number, as a text."""
    *others, last = [str(i) for i in range(1, number + 1) if number % i == 0]
    return f"{', '.join(others)} or {last}" if others else last


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _mean_weight(window: WholeWindow, loss: int) -> float:
    """Return the mean weight of a window's microbatches, the first weight if they are equal; 0 for an empty window."""
    if window.microbatches == 0:
        return 0.0
    return float(np.ravel(window.sums[f"{_OF}weight_sum"])[loss]) / window.microbatches or 1.0


def _unit_name(loss: int) -> str:
    return f"{_OF}weight_unit{loss + 1 if loss else ''}"


def _buffer_names(parameters: Iterable[str], loss: int) -> list[str]:
    return [f"{_OF}{f'loss{loss + 1}.' if loss else ''}{name}" for name in parameters]


def _shard_names(sharing: Sharing) -> list[str]:
    return [f"{_OF}shard{i}" for i in range(len(sharing.buckets))]


def _add(sums: Arrays, entries: Arrays, names: Iterable[str], factor: float = 1.0) -> None:
    for name in names:
        if name in entries:  # a rank whose window is empty saves no buffers of further losses
            addend = np.multiply(entries[name], factor, dtype=np.result_type(entries[name], np.float32))
            sums[name] = sums[name] + addend if name in sums else addend


def _joined(parts: list[Arrays], saved: Sharing, shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """Return whole buffers from the shards of a party."""
    names, buffers = list(shapes), {}
    for shard, members in zip(_shard_names(saved), saved.buckets):
        flat, start = np.concatenate([part[shard] for part in parts]), 0
        for name in (names[i] for i in members):
            size = int(np.prod(shapes[name]))
            buffers[_OF + name] = flat[start:start + size].reshape(shapes[name])
            start += size
    return buffers


def _cut(buffers: Arrays, sharing: Sharing, place: int, shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """Return the shards of the rank at a place of its party."""
    names, shards = list(shapes), {}
    for shard, members in zip(_shard_names(sharing), sharing.buckets):
        flat = np.concatenate([buffers[_OF + names[i]].reshape(-1) for i in members])
        flat = np.pad(flat, (0, -len(flat) % sharing.party))
        shards[shard] = np.split(flat, sharing.party)[place]
    return shards

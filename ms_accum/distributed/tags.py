"""Tags: what each rank is about to exchange, compared on all ranks before anything is exchanged.

Collectives are anonymous: what one rank sends in a flush pairs with what another sends in a window, for another
accumulator, or in a save. So each exchange begins with one small AllReduce of a fixed size, in which each rank has a
row: its tag, and three numbers that the exchange needs anyway.

    rank 0:  trains accumulator 1 ─┐
    rank 1:  saves a checkpoint   ─┴─► the tags differ: nothing more is exchanged, both ranks raise an error

A graph cannot raise an error. It sets a mark on the device instead; while it is set, no accumulator applies a window.
The host reads the mark before a window closes, and at each flush, save and status; in a cell, after each 64th
microbatch. Where ranks sum each microbatch, a graph goes on with its exchange after the tags: then the run may end by
an error of MindSpore, or because nobody answers.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from ..mindspore_api import GlobalComm, get_rank, jit_class
from ..tensors import as_vector, state_parameter
from .ranks import computes_nothing, left_alone, world_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..tensors import Numbers, Scalar

# What a rank does: the first number of a tag. Then come the accumulator, its round (see `ManyRanks`), the microbatches
# in the open window, if ranks count them together, and the mark.
TRAIN, SAVE, LOAD, BUILD, COMPARE, WAIT, EVALUATE = range(1, 8)
_DOES = {TRAIN: "trains accumulator {} in round {}",
         SAVE: "saves a checkpoint of accumulator {}", LOAD: "loads a checkpoint of accumulator {}",
         BUILD: "builds accumulator {}, or a step for it", COMPARE: "compares parameters of accumulator {}",
         WAIT: "waits for all ranks", EVALUATE: "evaluates with accumulator {}"}
_TAG, _WIDTH = 5, 8  # numbers in a tag, and in a row
_DIFFER = ("ranks made different calls, so nothing was exchanged: {}; let every rank make the same calls in the same "
           "order (build, flush, evaluate, save, load), and call flush() after a loop that only some ranks leave "
           "early, which begins the next round{}")
_CHANGED = ("; parameters are those of the last update of all ranks: load a checkpoint, or build a new train step or "
            "accumulator, on all ranks to go on")
_BEGUN = "; a rank may have begun to exchange gradients: start the processes again, from a checkpoint"
_FOREIGN = ("an exchange of ms_accum was mixed with another collective: {}; call your own collectives (AllReduce, ...) "
            "at the same place on every rank, and not while another rank may still train or flush, e.g. after flush(); "
            "start the processes again, from a checkpoint")
_COUNTED = " (accumulators are counted as they are built: {})"
_built: list[str] = []  # the first parameter of each accumulator that exchanges, in order
_sum_each: set[int] = set()  # accumulators whose ranks sum each microbatch: a graph exchanges although they disagree
_earlier: list[str] = []  # disagreements after which ranks built a new accumulator; older accumulators stay stopped


class RanksDiffer(RuntimeError):
    """Report that ranks were about to exchange different things. No graph has failed."""


@jit_class
class Tags:
    """Exchange tags in a group of ranks.

    Args:
        group: Name of the group.
        members: The ranks in it, in order.

    Attributes:
        heard: The rows of the last exchange, or of the first disagreement: float32 `(ranks, 8)`.
        agreed: The mark: 0 once ranks have disagreed in a graph, else 1; float32 Parameter `(1,)`, one for all groups.
    """

    def __init__(self, group: str, members: Sequence[int]) -> None:
        self.members, self.place, self.size = tuple(members), tuple(members).index(get_rank()), len(members)
        self.sum = ops.AllReduce(group=group)
        self.heard = state_parameter(f"{group}.heard", (self.size, _WIDTH), ms.float32)
        known = next(iter(_of_groups.values()), None)
        self.agreed: Parameter = known.agreed if known else state_parameter("ranks.agreed", (1,), ms.float32, 1.0)

    def rows(self, row: Tensor) -> Tensor:
        """Return the rows of all ranks in the group, flat, given this rank's, `(8,)`."""
        # Not an AllGather: on CPU, MindSpore 2.10 has one for all ranks together only.
        before, after = self.place * _WIDTH, (self.size - 1 - self.place) * _WIDTH
        parts = (row,)  # type: tuple[Tensor, ...]
        if before:
            parts = (ops.zeros(before, ms.float32), *parts)
        if after:
            parts = (*parts, ops.zeros(after, ms.float32))
        return self.sum(ops.concat(parts))

    def compare(self, number: int, rounds: Tensor, numbers: Numbers, held: Scalar = 0) -> tuple[
            Tensor, Tensor, Tensor]:
        """Exchange tags and three numbers. Return whether all tags are equal (bool `()`), and the sums, `(3,)`.

        If the mark is 0 already, the result is False. Also return what the collective returned: on Ascend, gradients
        that wait for the sums, a few kernels later, would be exchanged later (12 x Dense 2048, sync="microbatch": 12.3
        bytes per parameter instead of 8.8).

        Args:
            number: Of the accumulator.
            rounds: See `ManyRanks`; float32 `(1,)`.
            numbers: Three numbers.
            held: Number of microbatches in the open window, if ranks count them together.
        """
        does, before = Tensor([TRAIN, number], ms.float32), self.agreed + 0.0
        rest = as_vector((held, 1.0, *numbers))
        flat = self.rows(ops.concat((does, rounds, rest[:1], before, rest[2:])))
        rows = flat.reshape(self.size, _WIDTH)
        agreed = ops.equal(rows[:, :_TAG], ops.concat((does, rounds, rest[:2]))).all()
        ops.assign(self.heard, ops.where(before == 1, rows, self.heard))
        ops.assign(self.agreed, agreed.reshape(1).astype(ms.float32))
        return agreed, rows[:, _TAG:].sum(0), flat


def tags_of(group: str, members: Sequence[int]) -> Tags:
    """Return the tags of a group of ranks; all accumulators share them."""
    if group not in _of_groups:
        _of_groups[group] = Tags(group, members)
    return _of_groups[group]


_of_groups: dict[str, Tags] = {}


def disagreement(forgiven: int) -> Optional[RanksDiffer]:
    """Return the error to raise if ranks have disagreed in a graph. It reads the device.

    `forgiven`: the number of earlier disagreements (`disagreements()`) that do not count.
    """
    marked = [tags for tags in _of_groups.values() if not tags.agreed.asnumpy().all()]
    if computes_nothing() or not (marked or _earlier[forgiven:]):
        return None
    if not marked:
        return RanksDiffer(_earlier[-1])
    heard = {tags: tags.heard.asnumpy() for tags in marked}
    tags = next((tags for tags, rows in heard.items() if (rows != rows[0])[:, :_TAG].any()), marked[0])
    return RanksDiffer(said_by(heard[tags], tags))


def disagreements() -> int:
    """Return the number of disagreements after which ranks built a new accumulator."""
    return len(_earlier)


def forget_disagreement() -> None:
    """Forget that ranks have disagreed: all of them have met since, to load a checkpoint or to build an accumulator."""
    for tags in _of_groups.values():
        ops.assign(tags.heard, ops.zeros_like(tags.heard))
        ops.assign(tags.agreed, ops.ones_like(tags.agreed))


def announce_new(first: str, sums_each: bool) -> int:
    """Say that this rank builds an accumulator, whose first parameter is `first`. Return its number.

    `sums_each`: whether ranks sum each microbatch.

    Accumulators that exchange are counted as they are built. When all ranks build the same one, they have met: it can
    train, although they disagreed before. Older accumulators may have lost a window, so they keep raising the error.
    """
    announce(BUILD, len(_built) + 1)
    differ = disagreement(disagreements())
    _built.append(first)
    if sums_each:
        _sum_each.add(len(_built))
    if differ is not None:
        _earlier.append(str(differ))
        forget_disagreement()
    return len(_built)


def announce(what: int, number: int = 0, groups: Sequence[Tags] = ()) -> None:
    """Say what this rank does next, and raise `RanksDiffer` on every rank unless all do the same. For the host.

    `groups`: other groups than that of all ranks, in which ranks may exchange now: they are asked first.
    """
    if world_size() == 1 or computes_nothing():
        return
    sent = np.array([what, number, 0, 0, 1, 0, 0, 0], np.float32)
    everybody = tags_of(GlobalComm.WORLD_COMM_GROUP, range(world_size()))
    for tags in (*(tags for tags in groups if tags is not everybody), everybody):
        with left_alone(_DOES[what].format(number, 0)):
            rows = tags.rows(Tensor(sent)).asnumpy().reshape(-1, _WIDTH)
        if not np.array_equal(rows[:, :_TAG], np.tile(sent[:_TAG], (len(rows), 1))):
            # These ranks have the mark now, or nothing is known of them.
            if (rows[:, 0] == TRAIN).any() or not _are_tags(rows):
                ops.assign(tags.heard, Tensor(rows))
                ops.assign(tags.agreed, ops.zeros_like(tags.agreed))
            raise RanksDiffer(said_by(rows, tags))


def wait_for_all() -> None:
    """Wait for every rank: a rank that still communicates fails if another one ends."""
    announce(WAIT)


def said_by(rows: np.ndarray, tags: Tags) -> str:
    """Return the message about rows of a group whose tags differ."""
    if not _are_tags(rows):
        seen = [f"rank {rank} seems to send {row.tolist()}" for rank, row in zip(tags.members, rows)]
        return _FOREIGN.format("; ".join(seen))
    does, numbers = [], sorted({*map(int, rows[:, 1])})
    for rank, row in zip(tags.members, rows):
        what, number, rounds, held, agreed, *_, active = row.tolist()
        text = _DOES[int(what)].format(int(number), int(rounds)) + f", with {held:g} microbatches" * (held > 0)
        if what == TRAIN and active == 0:
            text = text.replace("trains", "flushes")
        does.append(f"rank {rank} {text}{' and disagreed with others before' * (agreed == 0)}")
    known = ", ".join(f"{n} is that of {_built[n - 1]}" for n in numbers if 0 < n <= len(_built))
    training = {int(number) for what, number in rows[:, :2] if what == TRAIN}
    return _DIFFER.format("; ".join(does) + _COUNTED.format(known) * bool(known),
                          _BEGUN if training & _sum_each else _CHANGED * bool(training))


def _are_tags(rows: np.ndarray) -> bool:
    """Return whether ranks have sent tags, and not what another collective sends."""
    tags = rows[:, :_TAG]
    return bool(np.isin(tags[:, 0], list(_DOES)).all() and np.isin(tags[:, -1], (0, 1)).all()
                and (tags == tags.round()).all() and (tags >= 0).all())

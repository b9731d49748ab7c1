"""An epoch that someone has to iterate over: warn if nobody does, or if it holds no batch; skip what was trained."""
from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar
from warnings import warn

from ..mindspore_api import is_read_to_be_counted

Item = TypeVar("Item")
_UNUSED = ("nobody iterated over train_step.epoch(batches), so nothing was trained; write "
           "`for loss in train_step.epoch(batches): ...`, which trains one microbatch after the other")
_EMPTY = ("train_step.epoch(batches) got no batch, so nothing was trained; give batches again for each epoch: an "
          "iterator or a generator that was read before is used up")


class Epoch(Iterator[Item]):
    """Iterate over what a generator yields. When it is collected without having begun, warn.

    Its length is that of the batches, less those that are skipped; there is none if the batches have none. So a
    progress bar, `tqdm(epoch)`, knows it.

    Args:
        items: The generator.
        batches: What is iterated over.
        skipped: Returns how many of the batches are skipped, if the epoch begins now.
    """

    _has_begun = True  # also if an interrupt stops `__init__`

    def __init__(self, items: Generator[Item, Any, Any], batches: Iterable, skipped: Callable[[], int]) -> None:
        self._items, self._batches, self._skipped = items, batches, skipped
        self._first = 0
        self._has_begun = False

    def __next__(self) -> Item:
        """Return the next item."""
        if not self._has_begun:
            self._first = self._skipped()
        self._has_begun = True
        return next(self._items)

    def __len__(self) -> int:
        """Return the number of items, from the first to the last. Raise TypeError if the batches have no length.

        `list` and `tqdm` ask for it, so a dataset is not read for it.
        """
        if is_read_to_be_counted(self._batches):
            raise TypeError("MindSpore would read the whole dataset to count its batches")
        length = len(self._batches)  # type: ignore[arg-type]
        return max(length - (self._first if self._has_begun else self._skipped()), 0)

    def __bool__(self) -> bool:
        """Return True, as for other iterators, which have no length."""
        return True

    def close(self) -> None:
        """Leave the epoch, as `break` in a loop does."""
        self._has_begun = True
        self._items.close()

    def __del__(self) -> None:
        """Warn if no item was asked for."""
        if not self._has_begun:
            warn(_UNUSED, UserWarning, stacklevel=2)


def warn_of_no_batch() -> None:
    """Warn that an epoch held no batch; called in the generator of an `Epoch`."""
    warn(_EMPTY, UserWarning, stacklevel=4)


def without_first(skip: int, batches: Iterable, see: Callable[[Any], object] = lambda batch: None) -> Iterable:
    """Return the batches but the first `skip`, which are read. Raise ValueError if there are fewer.

    The `skip` of a `mindspore.dataset` would read and map them, too (MindSpore 2.10).

    `see`: called with each of those.
    """
    if skip == 0:
        return batches
    rest, held = iter(batches), 0
    for batch in islice(rest, skip):
        held += 1
        see(batch)
    if held < skip:
        raise ValueError(f"{skip} microbatches of this epoch were trained before, but there are only {held} batches; "
                         "give all batches of the epoch, or give resume=False and only those not yet trained")
    return rest

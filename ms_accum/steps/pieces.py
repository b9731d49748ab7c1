"""The graphs for all batches of one layout, which the host calls: one for a whole batch, or one for each piece."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ..core.window import END, Window, change
from ..tensors import as_tensor, divide_no_nan, multiply_no_nan, unstack
from .batch import Cut, axis_of, checked_aux, places_of, samples_in_graph, select_rows, starts_of
from .forward import reported, summed

Compile = Callable[..., Callable]  # `compile(function)`: see `Boundary.compiled`


def whole(train: Callable, window: Window, compiled: Compile, samples: int, has_aux: bool, batch_axis: int,
          is_dynamic: bool, is_summed: bool = False) -> Callable:
    """Return `(*batch) -> loss`, or `(loss, aux)`, which trains on a batch that is not cut."""
    def step(*batch: Any) -> Any:
        rows = samples_in_graph(batch, batch_axis) if is_dynamic else samples  # type: Any
        trained = train(rows, batch, END)  # not unpacked: MindSpore warns of a part that is not used
        loss = (summed if is_summed else reported)(window, trained[0], trained[1])
        return (loss, trained[2]) if has_aux else loss

    return compiled(step)


def in_pieces(train: Callable, window: Window, compiled: Compile, samples: int, cut: Cut, pieces: int, has_aux: bool,
              batch_axis: int, is_summed: bool = False) -> Callable:
    """Return `(*batch) -> loss`, `(loss, aux)`, or the sums of weight * loss and weights: a graph for all of a size."""
    starts = starts_of(samples, pieces)
    sizes = {rows: _piece(train, window, compiled, rows, cut, has_aux, batch_axis) for _, rows in starts}
    calls = [(sizes[rows], Tensor(start, ms.int32), end) for (start, rows), end in zip(starts, ends_of(len(starts)))]
    # Sums are passed from piece to piece: the losses of all pieces would fragment MindSpore's memory pool, and the peak
    # would grow with the number of pieces (48 pieces: 286 MB instead of 84).
    zero = Tensor(np.zeros(2), ms.float32)

    def step(*batch: Any) -> Any:
        totals, found, mean = zero, [], None
        for graph, start, after in calls:
            totals, mean, *of_piece = graph(start, after, totals, *batch)
            found.append(of_piece)
        if is_summed:
            return totals
        return (mean, joined(found, unstack(totals)[1], batch_axis)) if has_aux else mean

    return step


def ends_of(pieces: int) -> list[Tensor]:
    """Return what each piece of a microbatch adds to the counts in the end: what ends a microbatch is data."""
    last = pieces - 1  # each takes back its own mark; the first one leaves one more, which the last one takes back
    return [change(MARK=(i == 0) - (i == last) - 1, **dict.fromkeys(("HELD", "OWN", "ADDED"), int(i == last)))
            for i in range(pieces)]


def _piece(train: Callable, window: Window, compiled: Compile, rows: int, cut: Cut, has_aux: bool, batch_axis: int
           ) -> Callable:
    """Return `(start, after, totals, *batch) -> (totals, mean loss)`, followed by the weight and the aux."""
    places = places_of(rows)

    # `start`: the first sample. `totals`: the sums of weight * loss, and of the weights: float32 `(2,)`.
    def piece(start: Tensor, after: Tensor, totals: Tensor, *batch: Any) -> tuple:
        # The samples are gathered here, from the whole batch: a graph's argument is not copied.
        trained = train(rows, select_rows(start + places, cut, batch), after)
        totals = totals + summed(window, trained[0], trained[1])
        sums = unstack(totals)
        mean, weight = divide_no_nan(sums[0], window.divisor(sums[1])), as_tensor(trained[1])
        return (totals, mean, weight, checked_aux(trained[2], rows, batch_axis)) if has_aux else (totals, mean)

    return compiled(piece)


def looked_at(look: Callable, window: Window, compiled: Compile, samples: int, cut: Cut, pieces: int, batch_axis: int,
              is_dynamic: bool) -> Callable:
    """Return `(*batch) -> (sum of weight * loss, weight)`: float32 `(2,)`, without training."""
    if pieces == 1:
        return whole(look, window, compiled, samples, False, batch_axis, is_dynamic, is_summed=True)
    return in_pieces(look, window, compiled, samples, cut, pieces, False, batch_axis, is_summed=True)


def joined(found: list, total: Tensor, batch_axis: int) -> Any:
    """Return the aux of pieces, `found` as `(weight, aux)`: values per sample joined, of scalars the mean by weight."""
    def join(values: tuple) -> Tensor:
        if values[0].ndim:
            return ops.concat(values, axis_of(values[0].ndim, batch_axis))
        return divide_no_nan(sum(multiply_no_nan(v.astype(ms.float32), w) for v, w in zip(values, weights)), total)

    weights, aux = zip(*found)
    return tuple(map(join, zip(*aux))) if isinstance(aux[0], tuple) else join(aux)

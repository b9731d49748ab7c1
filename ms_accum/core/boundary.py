"""The boundary: decide on the host when the window of a train step closes, and close it, by graphs or op by op.

In a cell, and with an Accumulator by hand, the device decides; the host only closes a full window that an interrupt has
left. For a train step, the host counts down. It reads the device only where it cannot know:

- when a window should be full, if a stage may skip a microbatch or drop a window;
- after each microbatch, if a weight closes windows (`until_weight`);
- when an epoch begins;
- before the next microbatch after an error, a load, or a flush;
- in a cell, after as many microbatches as may still be skipped in a row, at most 64.

    begin:   count known? ─ no ─► read the device, close the window if it is full
                  │ yes
                  ▼
             (the step adds the microbatch)
                  │
    end:     the last one of its window? ─ no ─► count down
                  │ yes
                  ▼
             may skip, drop, or wait for a weight? ─ no ─► update
                  │ yes: read the device
                  ▼
             full? ─ no ─► count again;   accepted? ─ yes ─► update, no ─► drop

    flush:   take part in the windows of ranks that still have data, with weight 0; then close what is open

With several ranks, the host reads before a window closes, and at each flush, save and status, whether ranks agreed in
the exchanges before.

The place in an epoch (epochs finished, microbatches trained since) is on the device, where a graph counts as a whole or
not at all. Once there was a loop over an epoch, only its microbatches count: `keep_place` takes back what a graph has
counted for others. A load sets the place of the file; `begin_epoch` then says how many batches to skip. If the body of
a loop loads, `go_on` brings the loop back to its own place.
"""
from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Optional
from warnings import warn
from weakref import finalize

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from ..tensors import require_trainable
from .facts import given_to
from .memory import addresses_of, require_same
from .notes import register
from .optimizers import assign_rates_of_groups, follow_rates, options_of_groups, rates_at
from .window import UPDATING

if TYPE_CHECKING:
    from .window import Window

_TORN_BATCH = ("the open window may hold only some pieces of a batch, because an error or an interrupt stopped the "
               "others (op by op: only some of its gradients); call reset(), which drops the open window, "
               "and continue with the next batch")
_TORN_UPDATE = ("an error or an interrupt stopped an update, so it may have changed only some of the parameters (or it "
                "stopped a reset or a load); load a checkpoint, on all ranks, or, on one device, call "
                "reset(), which drops the window")
_STUCK = ("more than max_skips={} {} in a row were skipped ({} by now, {} in all), because {}, after "
          "update {}; look for NaN in the batches since then, lower the initial loss scale or the "
          "learning rate, or load a checkpoint; another call continues the training")
_LOST = ("a window of the accumulator for {} that holds {} is lost: it was neither applied, saved (by save_checkpoint) "
         "nor reset; train with train_step.epoch(batches), which applies the incomplete last window, call flush(), "
         "give Model the callback FlushCallback(), or call reset() to drop it")
_RESUMED = ("the checkpoint was saved after {} microbatches of epoch {} (counted from 0); give all batches of that "
            "epoch to epoch(batches, resume=True), which skips these; or only the others, with resume=False. For "
            "epochs of n batches, give epoch(islice(batches, n)): after break, an epoch has not ended")
_ADDED = ("a group of parameters was added to the optimizer after this was built, so it would not be trained; build "
          "the optimizer with all groups, and then the train step, cell or Accumulator again")
_NOT_SKIPPED = ("the checkpoint was saved after {0} microbatches of an epoch, but the dataset skips none: if it begins "
                "with them, they are trained again; call model.train(1, dataset.skip({0}), ...) first")
_GOES_ON = ("{} microbatches that were trained before are in an open window, which this training fills up with the "
            "first batches of its data; to go on with an epoch that was stopped, call model.train(1, dataset.skip({}), "
            "...) first; to drop the window, call reset()")
_LEFT = ("the last loop was left in epoch {} (counted from 0) after {} microbatches, so it is not known whether the "
         "epoch goes on; leave out resume to begin the next one, or give resume=False and only its other batches")
_OTHER_SIZE = ("resume=True has skipped {} batches, because as many microbatches of this epoch were trained; these had "
               "{} samples, but those skipped have {}; if the microbatch size was changed, other samples were skipped "
               "than were trained: give resume=False, and only the samples that are left")
_STOPPED = ("an error or an interrupt stopped a microbatch, perhaps after its forward pass had moved statistics of "
            "BatchNorm: they are then off by this microbatch, or move twice if it is trained again; load a checkpoint "
            "for exact ones")
_OTHER_LOOP = ("another loop over epoch of this step has begun, so this one cannot go on; train on the batches of both "
               "in one loop, or by single calls")
_OTHER_RANKS = ("the checkpoint was saved in the middle of an epoch with another number of ranks or another "
                "DataParallel, so it does not know which batches this rank has trained; give resume=False, and only "
                "batches that no rank has trained")
_FEW_READS = 64  # microbatches of a cell between two reads of the skips


class NoProgress(RuntimeError):
    """Report that more than `max_skips` were skipped in a row. No graph has failed."""


class Status(NamedTuple):
    """Hold the counters of an accumulator in one read; `Accumulator` explains those of the same name.

    Attributes:
        update_step: Number of updates done.
        mini_step: Number of microbatches in the open window.
        needed: Number of microbatches that the open window still needs, at least; 0 if it is full.
        seen: Number of samples (or of what `weight_fn` counts) in all updates.
        skipped: Number of gradients that were ignored because they were not finite.
        closed_windows: Number of windows closed.
        window_weight: Sum of the weights in the last closed window.
        grad_norm: Norm of the last update's gradient before clipping; NaN without `clip_norm`.
        skipped_in_row: Number of the latest skips in a row.
        unfinished: 0, unless an error or an interrupt stopped a microbatch or an update.
        epochs: Number of epochs finished; see `TrainStep.epochs`.
        trained: Number of microbatches trained since, on this rank, including those that were skipped.
        empty_windows: Number of windows closed whose weight, over all ranks, was 0, e.g. without any token.
    """

    update_step: int
    mini_step: int
    needed: int
    seen: int
    skipped: int
    closed_windows: int
    window_weight: float
    grad_norm: float
    skipped_in_row: int
    unfinished: int
    epochs: int
    trained: int
    empty_windows: int


class Samples(NamedTuple):
    """Count the samples of an epoch's microbatches, to notice where it goes on with batches of another size.

    Attributes:
        all: Their number.
        microbatches: In how many. After an error or an interrupt, one may be missing.
    """

    all: int = 0
    microbatches: int = 0


class Logged(NamedTuple):
    """Hold what a `WindowLog` has seen of the open window, for a checkpoint, or what a checkpoint held.

    Attributes:
        closed: Number of windows closed before it.
        weight: Sum of its weights.
        losses: For each microbatch, its loss and its weight.
        is_loaded: Whether a checkpoint held it.
    """

    closed: int = -1
    weight: float = 0.0
    losses: tuple = ()
    is_loaded: bool = False


class Boundary:
    """Open and close the windows of an accumulator, for the host: one for each accumulator.

    Args:
        window: The open window on the device.
        settings: Settings that must be equal in a run that resumes in the middle of a window. The driver adds its own.
        max_skips: The number of skips in a row that raise no error.

    Attributes:
        addresses: Where the trained parameters and the rates are, once a microbatch was trained.
        layers: That train steps or cells were found to use.
        held, updates, epochs, trained: Number of microbatches in the open window (at most, because some may have been
            skipped), of updates done, of epochs finished, and of microbatches trained in this epoch. They are right
            while `is_known`, for a train step; a cell does not count.
        others: Number of microbatches that have no place in this epoch: in epochs before it, and apart; see `begin`.
        samples: Number of samples in the microbatches of this epoch.
        loop: The number of the last loop over an epoch, counted as they begin.
        saved: Windows closed and microbatches open at the last checkpoint.
        reported: The value of `skipped` when an error about it was last raised.
        given: What the script gave the optimizer, once that is noted.
        first_options: What the optimizer's `param_groups` held then.
        logged: What a `WindowLog` has seen of the open window, which it writes here.
        recalled: What of that a checkpoint held. It is another object after each load, which tells the log of it.
        used_rates: Learning rates of the last update, if others may have been set since.
        since_load: Number of calls that trained a microbatch, or would have, since a checkpoint was loaded.
        has_epochs: Whether there was one, also in the run that was loaded.
        has_place: Whether `trained` counts the batches of this rank, not those of rank 0 in another exchange.
        eager: Whether the host runs op by op.
        generation: How often all graphs were forgotten.
        changes: How often an option in the optimizer's `param_groups` was changed, which graphs of an update hold.
        has_own_graphs: Whether a train step compiles all graphs that hold the window, so that they go with the step.
    """

    def __init__(self, window: Window, settings: dict[str, str], max_skips: int) -> None:
        self.window, self.settings, self.max_skips = window, settings, max_skips
        self.addresses: list[tuple[Parameter, int]] = []
        # Whether the host's countdown is enough: no microbatch can be skipped, no window dropped or closed by a weight.
        self._may_skip = window.may_skip or window.may_drop
        self._counts_alone = not self._may_skip and window.length.budget is None
        self.has_own_graphs = False
        self.eager, self._graphs = True, {}  # type: bool, dict[str, Callable]
        self.generation = self.changes = 0
        self.saved: Optional[tuple[int, int]] = None
        self.reported: Optional[int] = None
        self._groups = len(options_of_groups(window.optimizer))
        self._options: Optional[list[dict[str, Any]]] = None  # of these, once they were read
        self.first_options: list[dict[str, Any]] = []
        self.given: dict[str, dict[str, str]] = {}
        self.logged = self.recalled = Logged()
        self.since_load = 0
        self.used_rates: Optional[tuple[float, ...]] = None
        self.layers: list[nn.Cell] = []
        self._is_running = False  # whether a microbatch has begun, and has not ended
        self._skipped_in_row = 0
        self._unread = 0  # microbatches of a cell since the last read of skips
        self.held = self.updates = self.epochs = self.trained = self.others = self.loop = 0
        self.samples = Samples()
        self.has_epochs, self.has_place = False, True
        self._place: Optional[tuple[int, int]] = None  # epochs and trained before a microbatch that has no place
        self._is_moved = False  # whether a checkpoint was loaded since the last loop has begun, or gone on
        self._is_loaded = False  # whether a checkpoint was loaded, and nothing was trained since
        self._is_interrupted = False  # whether the last loop over an epoch was
        self._may_be_full = False  # whether a call by hand has begun and has not ended: it may have been interrupted
        self._is_in_epoch = False  # whether a loop over an epoch has begun, and no flush has ended since
        self._ended: Optional[tuple[int, int]] = None  # windows and microbatches after the flush of an epoch, if last
        self._on_update: list[tuple[int, Callable[[], object]]] = []
        self.forget()
        register(window.number, self)

    def forget(self) -> None:
        """Let the next microbatch begin with a read of the device, because the counts here may be wrong."""
        self._missing: Optional[int] = None  # microbatches still needed, at least
        self._is_forgotten = True  # whether this was called since `begin`, e.g. by a load in a function of `on_update`
        self._counts_on_device = False  # whether a cell has ended the last microbatch: the device closes what is full

    def forget_graphs(self) -> None:
        """Compile again: a graph in which a kernel has failed fails in all later calls (MindSpore 2.10)."""
        self._graphs = {}
        self.generation += 1

    @property
    def is_known(self) -> bool:
        """Return whether the host's counts are valid without reading the device."""
        return self._missing is not None

    # --- a microbatch -------------------------------------------------------------------------------------------------

    def begin(self, in_epoch: bool = True, on_device: bool = False) -> int:
        """Begin a microbatch. Return how many microbatches the open window needs, at least, with this one.

        Call `end` after it. If that does not happen, because of an error or an interrupt, the next `begin` reads the
        device.

        Args:
            in_epoch: Whether a loop over an epoch trains it. Once there was such a loop, a microbatch that a script
                trains beside it (a hard batch again) has no place in an epoch: a resumed run would skip a batch for it.
            on_device: Whether `end_on_device` will end it, so that the host need not know how many are missing.

        Raises:
            RuntimeError: If an error left a part of a batch in the open window, or stopped an update; if more than
                `max_skips` were skipped in a row.
            ValueError: If a parameter is frozen, and this microbatch may close the window; see also `follow_groups`.
        """
        self.since_load += 1
        self.note_given()
        self.follow_groups()
        was_stopped, trained = self._is_running, self.trained
        known = 1
        if not (on_device and self._counts_on_device):
            self.ask()
            known = self._missing or 0
        if was_stopped and self.eager and self.trained == trained and self._has_statistics():
            warn(_STOPPED, UserWarning, stacklevel=2)
        self._is_running = True
        self._ended = self._place = None
        if in_epoch or not self.has_epochs:
            self._is_loaded = self._is_interrupted = False
        else:
            self._place = self.epochs, self.trained
        self.forget()  # `end` sets the counts again: after an error or an interrupt in between, the next call reads
        self._is_forgotten = False  # what comes from here on and forgets, such as a load, holds in `end`, too
        if known <= 1:
            require_trainable(self.window.weights)
        return known

    def end(self, missing: int, is_applied: bool = False, samples: int = 0) -> bool:
        """End a microbatch, and close its window if it is full. Return whether this made an update.

        `missing`: the result of `begin`. `is_applied`: whether the microbatch has updated as a window of its own.
        `samples`: its number of samples.
        """
        self._is_running = False
        if self._place is None:
            self.trained += 1
            before = Samples() if self.trained == 1 else self.samples
            self.samples = Samples(before.all + samples, before.microbatches + 1)
        else:
            self.keep_place()
            self._place, self.others = None, self.others + 1
        if not self.addresses:
            self.addresses = addresses_of(self.window)
        if is_applied:
            self._count_update()
        elif missing > 1:
            self.held, self._missing = self.held + 1, missing - 1
            return False
        elif self._counts_alone:
            is_applied = self._close()
        else:
            status, accepted = self._read_at_boundary()
            if status.needed > 0:  # a microbatch was skipped, or the window waits for its weight
                self._check_skips()
                self.held, self._missing = status.mini_step, status.needed
                return False
            is_applied = self._close(accepted)
        if not self._is_forgotten:
            length = self.window.length
            self.held, self._missing = 0, length.constant or length.missing(0, self.updates)
        return is_applied

    def end_on_device(self) -> None:
        """End a microbatch after which the device has closed the window if it was full.

        Read as soon as more than `max_skips` may have been skipped in a row. With several ranks, ask after each 64th
        microbatch whether they agree.
        """
        self._is_running = False
        if not self.addresses:
            self.addresses = addresses_of(self.window)
        self._unread += 1
        left = self.max_skips - self._skipped_in_row if self._may_skip else _FEW_READS
        if self._unread > left or self._unread >= _FEW_READS:
            self._unread = 0
            if self._may_skip:
                self.require_progress()
            else:
                self.window.exchange.require_agreement()
        self._counts_on_device = True

    def end_pieces(self, pieces: int, trained: int = 1) -> None:
        """End a microbatch whose pieces were added by other graphs; see `Window.end`."""
        self._run("end_and_count", Tensor(pieces, ms.int32), Tensor(trained, ms.int32))

    def add_nothing(self, active: float) -> float:
        """Add a piece without data; see `Window.add_nothing`."""
        return self._run("add_nothing", Tensor(active, ms.float32))

    # --- a window -----------------------------------------------------------------------------------------------------

    def flush(self, pieces: int = 1, ends_epoch: bool = False) -> tuple[bool, bool]:
        """Apply the incomplete window if one is open. Return whether a window was closed, and whether one was applied.

        With several ranks, take part in the windows of the others until no rank has data, and compare the parameters.

        Args:
            pieces: The number of pieces in which each rank adds a microbatch.
            ends_epoch: Whether an epoch calls it at its end. Then the next call does nothing, unless something was
                trained in between. A rank that has left the same epoch early calls flush by hand, in place of this one,
                and may be in its next epoch: a second flush here would join that.
        """
        require_trainable(self.window.weights)
        self.require_same_memory()
        self.follow_groups()
        self.forget()
        status, exchange, closed, applied = self._whole(), self.window.exchange, False, False
        was_ended, self._ended = self._ended == (status.closed_windows, status.mini_step), None
        if was_ended and not ends_epoch:
            return False, False
        held, self.updates = status.mini_step, status.update_step
        while exchange.inside > 1:  # ranks that sum each microbatch: add empty ones until none of them has data
            still_active = max(float(self.add_nothing(0.0)) for _ in range(pieces))
            self.end_pieces(pieces, 0)
            status = self._whole()
            if still_active == 0:
                break
            held = status.mini_step
            if status.needed == 0:
                closed, applied, held = True, self._close() or applied, 0
        active = 1.0  # ranks that still have data; 1 until the first exchange says how many
        while exchange.across > 1 and active > 0:  # ranks that sum each window: take part with what is held, or nothing
            was_open, updated, active = self._close_together(0.0)
            closed, applied, held = closed or was_open, applied or updated, 0
        if held > 0:
            closed, applied = True, self._close() or applied
        exchange.end_round()
        exchange.compare_parameters()
        self._check_skips()
        self._ended = (int(self.window.closed_windows), 0) if ends_epoch else None
        self._is_in_epoch = False
        return closed, applied

    # --- an epoch -----------------------------------------------------------------------------------------------------

    def begin_epoch(self, resume: Optional[bool]) -> int:
        """Begin an epoch, or go on with one. Return the number of batches to skip. `resume`: as in `TrainStep.epoch`.

        Raises:
            RuntimeError: If a parameter has new memory; if a checkpoint was loaded in the middle of an epoch, and
                `resume` is None, or it was saved by other ranks; if `resume` is True, and the last loop was left, but
                not by an error or an interrupt.
        """
        self.require_same_memory()
        status = self.status()
        self._place = self._ended = None
        trained = self._trained_of(status)
        was_left, self._is_in_epoch, self._is_moved, self.loop = self._is_in_epoch, True, False, self.loop + 1
        if resume is None or trained == 0:
            if trained > 0 and self._is_loaded:
                raise RuntimeError(_RESUMED.format(trained, status.epochs))
            if was_left and resume is None:
                self.window.exchange.end_round()
            self._leave_epoch(status)
            return 0
        self.has_epochs = True
        if not resume:
            return 0
        if not (self._is_loaded or self._is_interrupted):
            raise RuntimeError(_LEFT.format(status.epochs, trained))
        if not self.has_place:
            raise RuntimeError(_OTHER_RANKS)
        return trained

    def _has_statistics(self) -> bool:
        return any(layer.training and hasattr(layer, "moving_mean") for layer in self.layers)

    def skips(self) -> int:
        """Return how many batches an epoch skips if it goes on now. It reads the device."""
        return self._trained_of(self.status())

    def _trained_of(self, status: Status) -> int:
        """Return the number of microbatches trained in an epoch; 0 if a call has only compiled, and was reset."""
        left_nothing = status.closed_windows == status.mini_step == status.skipped == 0
        return 0 if left_nothing and not self.has_epochs else status.trained

    def go_on(self, loop: int, place: tuple[int, int]) -> None:
        """Go on with a loop over an epoch, of this number and at this place, after its body was run.

        If the body has loaded a checkpoint, the place in it is not that of the next batch. Raise RuntimeError if
        another loop has begun.
        """
        if loop != self.loop:
            raise RuntimeError(_OTHER_LOOP)
        if self._is_moved:
            self._set_place(*place)
            self._is_moved, self._is_loaded, self.has_epochs, self._is_in_epoch = False, False, True, True

    def begin_training(self, skips: bool) -> None:
        """Begin epochs of a `Model`, whose data begin with an epoch, unless it `skips` some.

        Warn if a checkpoint from the middle of an epoch was loaded, or a window is open, and nothing is skipped.
        """
        status = self.status()
        if not (skips or self._is_loaded) and status.mini_step > 0:
            warn(_GOES_ON.format(status.mini_step, status.trained), UserWarning, stacklevel=3)
        if not skips and status.trained > 0:
            if self._is_loaded:
                warn(_NOT_SKIPPED.format(status.trained), UserWarning, stacklevel=3)
            else:
                self._leave_epoch(status)
        self.has_epochs = True

    def warn_of_other_samples(self, skipped: int, samples: int) -> None:
        """Warn if the batches of this epoch that were `skipped` hold more or fewer samples than were trained.

        It is not known after an interrupt.
        """
        trained, microbatches = self.samples
        if microbatches == skipped and trained != samples:
            warn(_OTHER_SIZE.format(skipped, trained, samples), UserWarning, stacklevel=3)

    def note_interrupted(self, loop: int) -> None:
        """Note that an error or an interrupt has ended this loop over an epoch, which may go on."""
        if loop == self.loop:
            self._is_interrupted = True

    def end_epoch(self, is_empty: bool = False) -> None:
        """Count an epoch, if anything was trained in it, or if it is known to be empty."""
        epochs, trained = self.window.place.asnumpy().tolist()
        self.others += trained
        self._set_place(epochs + (trained > 0 or is_empty), 0)
        self._is_loaded, self.has_place, self._is_interrupted = False, True, False

    def _leave_epoch(self, status: Status) -> None:
        """End an epoch that was left early. What single calls have trained before the first one is no epoch."""
        if self.has_epochs:
            self.end_epoch()
        else:
            self.others += status.trained
            self._set_place(status.epochs, 0)
        self.has_epochs = True

    def _set_place(self, epochs: int, trained: int) -> None:
        self.epochs, self.trained, self._place = epochs, trained, None
        ops.assign(self.window.place, Tensor([epochs, trained], ms.int32))

    def keep_place(self) -> None:
        """Take back that a graph has counted a microbatch without a place; also if it is not known whether it has."""
        if self._place is not None:
            self._set_place(*self._place)

    # --- closing ------------------------------------------------------------------------------------------------------

    def _close(self, accepted: Optional[bool] = None) -> bool:
        """Update with the open window, or drop it if a stage does not accept it. Return whether it was applied.

        If ranks disagree in a graph, the window stays open, and this returns True without waiting for the device: the
        next read raises the error.

        `accepted`: whether the stages accept it, if it was read.
        """
        exchange = self.window.exchange
        if exchange.ranks > 1:
            exchange.require_agreement()
        if not self.window.may_drop:
            # Ranks without data take part in `flush`, by `_close_together`: the same exchanges in the same order.
            self._run("close_with_update")
            self._count_update()
            return True
        if exchange.ranks > 1:
            return self._close_together(1.0)[1]
        if accepted is None:
            accepted = self._read_with_verdict()[1]
        self._run("close_with_update" if accepted else "close_without_update")
        self._count_closed(accepted)
        return accepted

    def _close_together(self, active: float) -> tuple[bool, bool, float]:
        """Exchange, and close the window of all ranks if one is open.

        Return whether one was open, whether it was applied, and the number of ranks that still have data. `active`: 1
        if this rank has, else 0.
        """
        agreed, *numbers = self._run("met", Tensor(active, ms.float32)).asnumpy().tolist()
        if not agreed:
            self.window.exchange.require_agreement()
        weight, microbatches, active = numbers
        if active == 0 and microbatches == 0:
            return False, False, 0.0
        met, accepted = Tensor(numbers, ms.float32), weight != 0 or not self.window.drops_empty
        closing: tuple = ("close_with_met", met)
        if accepted and self.window.judging:
            verdict, measured, *gradients = self._run("exchanged", met)
            accepted, closing = bool(verdict), ("close_with_exchanged", met, measured, *gradients)
        self._run(*closing if accepted else ("drop_with_met", met))
        self._count_closed(accepted)
        return True, accepted, active

    def _count_closed(self, is_applied: bool) -> None:
        self._skipped_in_row = 0 if is_applied else self._skipped_in_row + 1
        if is_applied:
            self._count_update()
        else:
            self._check_skips()

    def _count_update(self) -> None:
        self.updates += 1
        due = [function for every, function in self._on_update if self.updates % every == 0]
        if due:  # if ranks disagree, there was no update
            self.window.exchange.require_agreement()
        self.used_rates = rates_at(self.window.optimizer, -1) if due else None
        for function in due:
            function()

    def follow_groups(self) -> None:
        """Let the update see what a script has put into the optimizer's `param_groups`: compile it again if it has to.

        The graphs of microbatches stay: compiled again, their random layers would begin with their first values. Raise
        ValueError if a group was added.
        """
        if not self._groups:
            return
        assign_rates_of_groups(self.window.optimizer)
        options = options_of_groups(self.window.optimizer)
        if len(options) != self._groups:
            raise ValueError(_ADDED)
        if self._options is None:
            self.first_options = options
        elif options != self._options:
            self._graphs, self.changes = {}, self.changes + 1
        self._options = options

    def note_used_rates(self) -> None:
        """Note the rates of the last update, for a log, before others are set."""
        if self.used_rates is None:
            self.used_rates = rates_at(self.window.optimizer, -1)

    def call_after_updates(self, every: int, function: Callable[[], object]) -> None:
        """Call a Python function after each update whose count is a multiple of `every`; see `TrainStep.on_update`."""
        self._on_update.append((every, function))

    # --- reads of the device ------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Read where the window stands, if something has come between; close it if it is full."""
        if not self.is_known:
            status = self._whole()
            self.updates = status.update_step
            if status.needed == 0:
                self._close()
                status = self._whole()
            self.held, self.updates = status.mini_step, status.update_step
            self.epochs, self.trained, self._missing = status.epochs, status.trained, status.needed

    def status(self) -> Status:
        """Read the counters, and wait for the device. Raise `RanksDiffer` if ranks disagreed in an exchange."""
        self.window.exchange.require_agreement()
        self.keep_place()
        return self._status_of(self._run("counts").asnumpy().tolist())

    def described(self, name: str, counts: str, pieces: int = 1, shapes: int = 0) -> str:
        """Return the settings and counters of `name` as text. It waits for the device.

        `counts`: what `seen` counts. `pieces`: the number of pieces in which each microbatch is added. `shapes`: the
        number of shapes for which graphs were compiled.
        """
        status, length = self.status(), self.settings["accumulate_step"]
        held = str(status.mini_step)
        if self.window.length.budget is None:
            held += f" of {status.mini_step + status.needed}"
        length = f"{length} microbatch{'es' * (length != '1')} a window" if length.isdecimal() else length
        return "{}({})".format(name, ", ".join([
            length, *([f"{pieces} pieces"] if pieces > 1 else []), type(self.window.optimizer).__name__,
            f"{held} in the open window", f"{status.update_step:,} update{'s' * (status.update_step != 1)}",
            f"{status.seen:,} {counts}", *([f"{shapes} compiled shape{'s' * (shapes != 1)}"] if shapes else [])]))

    def _read_with_verdict(self) -> tuple[Status, bool]:
        *numbers, accepted = self._run("counts_and_verdict").asnumpy().tolist()
        return self._status_of(numbers), accepted == 1

    def _read_at_boundary(self) -> tuple[Status, Optional[bool]]:
        """Return the status of a window that should be full, and whether stages accept it, if they say so in a read."""
        # If a weight closes windows, most reads find no full window: no verdict on gradients is needed.
        window = self.window
        if window.may_drop and window.exchange.ranks == 1 and (window.length.budget is None or not window.judging):
            status, accepted = self._read_with_verdict()  # type: Status, Optional[bool]
        else:
            status, accepted = self.status(), None
        require_whole(status.unfinished)
        return status, accepted

    def _whole(self) -> Status:
        """Return the status. Raise RuntimeError if a batch or an update was not finished."""
        status = self.status()
        require_whole(status.unfinished)
        return status

    def _status_of(self, numbers: list[float]) -> Status:
        epochs, trained, update_step, mini_step, skipped, closed, in_row, unfinished, empty = map(int, numbers[:9])
        held, weight, norm, seen = numbers[9:]
        length = self.window.length
        needed = length.missing(mini_step, update_step, held)
        status = Status(update_step, mini_step, needed, int(seen), skipped, closed, weight, norm, in_row, unfinished,
                        epochs, trained, empty)
        self._skipped_in_row = in_row
        return status

    # --- op by op, or by graphs ---------------------------------------------------------------------------------------

    def run_as(self, eager: bool) -> None:
        """Say whether the driver runs op by op (`eager`), or by graphs: the host then does the same."""
        if eager != self.eager:
            self.eager, self._graphs = eager, {}

    def compiled(self, function: Callable) -> Callable:
        """Return `function` as a graph of its own; op by op, the function itself."""
        return function if self.eager else compiled(function)

    def straight(self, function: Callable, inputs: Optional[Callable] = None) -> Callable:
        """Return `function` as a graph without control flow; see `straight`. Op by op, the function itself."""
        return function if self.eager else straight(function, self.window, inputs)

    def _run(self, name: str, *arguments: Tensor) -> Tensor:
        """Call one of the window's methods for the host."""
        if name not in self._graphs:
            self._graphs[name] = self.straight(getattr(self.window, name))
        return self._graphs[name](*arguments)

    # --- skips --------------------------------------------------------------------------------------------------------

    def _check_skips(self) -> None:
        """Read, and raise RuntimeError, if the host has counted more than `max_skips` in a row."""
        if self._skipped_in_row > self.max_skips:
            self.require_progress()

    def require_progress(self) -> None:
        """Raise RuntimeError if more than `max_skips` were skipped in a row, unless these were reported before."""
        status, settings = self.status(), self.settings
        if status.skipped_in_row > self.max_skips and status.skipped != self.reported:
            self.reported = status.skipped
            looks = settings["on_nonfinite"] != "apply" or settings["loss_scaler"] != "None"
            reasons = ["their gradients were not finite"] * looks + ["windows had the weight 0"] * (
                status.empty_windows > 0) + ["a stage did not accept them"] * (settings["stages"] != "none")
            raise NoProgress(_STUCK.format(self.max_skips, self._skipped_noun(), status.skipped_in_row, status.skipped,
                                           " or ".join(reasons), status.update_step))

    def _skipped_noun(self) -> str:
        return "microbatches or pieces" if self.settings["on_nonfinite"] == "skip_microbatch" else "windows"

    # --- what other code does with the window -------------------------------------------------------------------------

    def note_filled(self) -> None:
        """Note that a microbatch is added by hand. Raise ValueError if a parameter is frozen."""
        require_trainable(self.window.weights)
        self.note_given()
        self._ended = None
        self._is_loaded = self._is_interrupted = False

    def note_called(self, runs_op_by_op: bool, is_done: bool) -> None:
        """Note that a call which adds a microbatch by hand begins, or is done.

        Op by op, an interrupt may have left a full window in the last call, or in the run that was loaded: close it. In
        a graph, a call is done or not as a whole.
        """
        if not runs_op_by_op:
            return
        if self.window.exchange.ranks > 1:
            self.window.exchange.require_agreement()
        if self._may_be_full and not is_done:
            self.forget()
            self.ask()
        self._may_be_full = not is_done

    def note_closed(self, is_applied: bool) -> None:
        """Note that a window is closed or dropped by hand. Raise ValueError if it is applied and a parameter is frozen.
        """
        if is_applied:
            require_trainable(self.window.weights)
        self.forget()
        self.logged = self.recalled = Logged()

    def note_given(self) -> None:
        """Note what the script gave the optimizer, before anything is trained, saved or loaded."""
        if not self.given:
            assign_rates_of_groups(self.window.optimizer)  # else a number in a group would differ from a Parameter
            self.given = given_to(self.window.optimizer)

    def require_same_memory(self) -> None:
        """Raise RuntimeError if a script has given trained parameters or rates new memory, which no graph knows.

        By hand, nobody notes the memory after the first microbatch, so the first call of this does it.
        """
        if self.window.is_in_use and not self.addresses:
            self.addresses = addresses_of(self.window)
        require_same(self.addresses, self.window)

    def losses(self) -> tuple:
        """Return the losses of the open window that a `WindowLog` has seen; none if it has missed a microbatch."""
        window, logged = self.window, self.logged
        known = (int(window.closed_windows), float(window.weight_sum)) == (logged.closed, logged.weight)
        return tuple(logged.losses) if known else ()

    def note_saved(self) -> None:
        """Note that a checkpoint holds all state: the open window is not lost if the run ends here."""
        self.saved = int(self.window.closed_windows), int(self.window.mini_step)

    @contextmanager
    def loading(self, is_open: bool, has_place: bool = True, losses: tuple = (), has_epochs: bool = False,
                samples: tuple[int, ...] = ()) -> Iterator[None]:
        """Mark that the block loads a checkpoint, so that a load that was interrupted raises an error at the next call.

        `is_open`: whether the checkpoint holds an open window. If not, buffers that have no memory yet get none.
        `has_place`: whether it holds this rank's own place in the epoch, not that of rank 0 in another exchange.
        `losses`: those of the open window; see `Logged`. `has_epochs`: whether its run has looped over an epoch.
        `samples`: see `Samples`.
        """
        window = self.window
        self.forget()
        window.mark_emptying()  # before anything is changed
        window.exchange.forgive()
        window.empty(is_open or window.is_allocated)
        ops.assign(window.empty_windows, 0)  # older files do not hold it
        yield  # no `finally`: after an error, the mark has to stay
        window.adopt(float(window.weight_unit))
        follow_rates(window.optimizer)
        ops.assign(window.unfinished, 0)
        self.note_saved()
        self.logged = Logged(int(window.closed_windows), float(window.weight_sum), losses, True)
        self.recalled, self.since_load = self.logged, 0
        self.reported, self._is_loaded, self.has_place, self._may_be_full = None, True, has_place, True
        self.samples = Samples(*samples)
        self._is_running, self._skipped_in_row = False, int(window.skipped_in_row)
        self._ended, self._is_in_epoch = None, False
        # Older files do not say whether there was a loop.
        self.has_epochs, self._is_moved = has_epochs or int(window.place[0]) > 0, True
        self._place = None

    def watch(self, accumulator: object, name: str) -> None:
        """Warn of a lost window when `accumulator` is collected or the process ends; then others may have its buffers.

        Only `save_checkpoint` of ms_accum counts as saving, not MindSpore's own checkpoints. `name` identifies the
        accumulator in the warning, with its number: Python shows each text once.
        """
        ended = finalize(accumulator, _at_the_end, self, os.getpid(), f"{name} (number {self.window.number})")
        # Not in the finalizer itself, which may run after MindSpore has ended.
        ended.atexit = False
        atexit.register(ended)


def require_whole(unfinished: int) -> None:
    """Raise RuntimeError if a batch or an update was not finished, given the sum of the marks."""
    if unfinished:
        # Marks of pieces may have been added to that of an update.
        raise RuntimeError(_TORN_UPDATE if unfinished <= UPDATING // 2 else _TORN_BATCH)


def _at_the_end(boundary: Boundary, process: int, name: str) -> None:
    if os.getpid() != process:  # a child that was forked must not touch the device
        return
    window, closed, held = boundary.window, 0, 0
    with suppress(Exception):  # an error that MindSpore reports late
        closed, held = int(window.closed_windows), int(window.mini_step)
    if held and boundary.saved != (closed, held):
        # Of the line that released the accumulator (2 is in weakref.py); at the end of the process, of no line.
        warn(_LOST.format(name, f"{held} microbatch{'es' * (held > 1)}"), UserWarning, stacklevel=3)
    with suppress(RuntimeError):
        differ = window.exchange.disagreement()
        if differ is not None:
            warn(str(differ), UserWarning, stacklevel=2)
    if boundary.has_own_graphs:
        window.exchange.give_back(window.buffers)


# --- graphs -----------------------------------------------------------------------------------------------------------


class Graph(nn.Cell):
    """Wrap a function as a Cell. MindSpore warns if a second train step compiles a jitted function, but not a Cell."""

    def __init__(self, function: Callable) -> None:
        super().__init__(auto_prefix=False)
        self.function = function

    def construct(self, *arguments: Any) -> Any:
        """Call the function."""
        return self.function(*arguments)


def compiled(function: Callable, inputs: Optional[Callable] = None, **options: str) -> Callable:
    """Return `function` as a graph of its own, in graph mode and PyNative. `options` of `ms.jit`.

    `inputs`: returns what a call is compiled for, given its arguments, if some have dynamic shapes.
    """
    graph = Graph(function)
    run = ms.jit(graph, **options)
    if inputs is None:
        return run

    def call(*arguments: Any) -> Any:
        graph.set_inputs(*inputs(arguments))  # in each call: arguments without a declaration may change their shapes
        return run(*arguments)

    return call


def straight(function: Callable, window: Window, inputs: Optional[Callable] = None) -> Callable:
    """Return `function` as a graph without control flow; on CPU, with a branch that is never taken. See `compiled`.

    On CPU, MindSpore 2.10 runs the kernels of a graph one after the other if there are at most 100 kernels and no
    branch, and the machine has few cores (`GraphScheduler::SetActorExecutionStrategy`; no setting changes that). On 2
    cores, forward and backward of an MLP then take 1.2 times as long. The branch is on `mini_step`, which is never
    negative.
    """
    if not needs_branch():
        return compiled(function, inputs, **window.exchange.jit_options)
    mini_step = window.mini_step

    def with_branch(*arguments: Any) -> Any:
        result = function(*arguments)
        if mini_step < 0:
            ops.assign(mini_step, 0)
        return result

    return compiled(with_branch, inputs)


def needs_branch() -> bool:
    """Return whether `straight` adds the branch."""
    return ms.get_context("device_target") == "CPU"

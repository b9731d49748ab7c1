"""All ways to give microbatches to an accumulator: calls, and whole epochs by a train step or `mindspore.train.Model`.
"""
from contextlib import suppress
from itertools import islice

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

from ms_accum import Accumulator, FlushCallback, TrainOneStepCell, make_train_step
from ms_accum.core.window import HELD
from ms_accum.distributed.meeting import world_size
from support.modes import compiled, running


class Driver:
    """Build an accumulator and drive it. A driver is a context manager, in which its calls are made.

    Args:
        name: "hand", "step", "cell" or "model" (a cell); then how it runs: "-jit" or nothing, "-graph" (in graph mode)
            or "-pynative".
        forward_fn: Function that returns the loss of a batch; a Cell for "cell".
        optimizer, accumulate_step, reduction, settings: Of the accumulator; `settings` are its options by name.
        weight_fn: Function that returns the weight of a microbatch. None: its number of samples.
        divisor: By hand, the divisor of gradients, as `reduction="sum"` requires it.
        loops: Whether a train step loops over `epoch`. Otherwise it is called.
        sink: Whether a model sinks its data.
        options: Options of `make_train_step`.
    """

    def __init__(self, name, forward_fn, optimizer, accumulate_step, weight_fn=None, divisor=1.0, reduction="mean",
                 settings=None, *, loops=False, sink=False, **options):
        self.kind, self.mode = name.split("-") if "-" in name else (name, "jit")
        self.forward_fn, self.weight_fn, self.divisor = forward_fn, weight_fn, divisor
        self.is_by_hand, self.loops, self.sink, self.logs = self.kind == "hand", loops, sink, ()
        settings = settings or {}
        if self.is_by_hand:
            self.accumulator = Accumulator(optimizer, accumulate_step, reduction=reduction, **settings)
        elif self.kind in ("cell", "model"):
            taken = {key: options[key] for key in ("batch_axis", "has_weight", "loss_reduction") if key in options}
            self.step = TrainOneStepCell(forward_fn, optimizer, accumulate_step, weight_fn=weight_fn, **taken,
                                         **settings)
        else:
            self.step = make_train_step(forward_fn, optimizer, accumulate_step, weight_fn=weight_fn,
                                        eager=self.mode == "pynative", **options, **settings)
        self.build()

    def build(self):
        """By hand, let later calls compile again. A step or a cell does that by itself."""
        if self.is_by_hand:
            self.step, self._flush_by_hand, self._empty_by_hand = (
                compiled(function, self.mode) for function in (self._by_hand(), self._close, self._add_nothing))
        else:
            self.accumulator = self.step
        self.boundary = self.accumulator.boundary

    def __enter__(self):
        self._context = running(self.mode)
        self._context.__enter__()
        return self

    def __exit__(self, *raised):
        return self._context.__exit__(*raised)

    def __call__(self, *batch):
        """Train on a microbatch of arrays. By hand, nothing is differentiated if it is empty."""
        if self.is_by_hand and not len(batch[0]):
            loss = self._empty_by_hand()
        else:
            loss = self.step(*map(Tensor, batch))
        if self.is_by_hand and world_size() > 1:
            self.accumulator.close()
        return loss

    def log(self, *logs):
        """Call each `WindowLog` for each update from now on."""
        if self.kind == "model":
            self.logs = logs
        else:
            for log in logs:
                self.step.on_update(log)

    def epoch(self, batches, skip=0, count=None, after=lambda result: None):
        """Train on the microbatches of an epoch, without the first `skip`. `after` gets what each returned.

        After `count` microbatches, it is interrupted. Otherwise, a model and a loop end the epoch.
        """
        if self.kind == "model":
            dataset = GeneratorDataset(batches, ["x", "ids", "target", "mask"], shuffle=False)
            dataset = dataset.skip(skip) if skip else dataset
            callbacks = [_After(after, count), FlushCallback(), *self.logs]
            with suppress(InterruptedError):
                Model(self.step).train(1, dataset, callbacks=callbacks, dataset_sink_mode=self.sink)
        elif self.loops:
            for result in islice(self.step.epoch(batches, skip), count):
                after(result)
        else:
            for batch in islice(batches, skip, count and skip + count):
                after(self(*batch))

    def flush(self):
        """Apply the incomplete window if one is open. Return whether a window was closed."""
        if not self.is_by_hand:
            return bool(self.step.flush())
        if self.mode == "pynative" or world_size() > 1:
            return self.accumulator.flush()
        return bool(self._flush_by_hand())

    def _close(self):
        return self.accumulator.close_if(self.accumulator.window.counts[HELD] > 0)

    def _add_nothing(self):
        added = self.accumulator.add if world_size() > 1 else self.accumulator  # with ranks, the host closes windows
        return ops.depend(Tensor(0.0), added(self.accumulator.weights, 0.0))

    def _by_hand(self):
        accumulator, forward_fn, divisor = self.accumulator, self.forward_fn, self.divisor
        weight_fn, added = self.weight_fn, accumulator.add if world_size() > 1 else accumulator

        def scaled(*batch):
            loss = forward_fn(*batch)
            return accumulator.scaled(loss), loss

        grad_fn = ms.value_and_grad(scaled, None, accumulator.weights, has_aux=True)

        def train_step(*batch):
            (_, loss), grads = grad_fn(*batch)
            if divisor != 1:
                grads = tuple([g / divisor for g in grads])
            weight = batch[0].shape[0] if weight_fn is None else weight_fn(*batch)
            return ops.depend(loss, added(grads, weight))

        return train_step


class _After(Callback):
    def __init__(self, after, count):
        super().__init__()
        self.after, self.left = after, count

    def on_train_step_end(self, run_context):
        self.after(run_context.original_args().net_outputs)
        if self.left is not None:
            self.left -= 1
            if not self.left:
                raise InterruptedError

"""The drivers of `ms-accum selftest`, and trainings of whole epochs, by a train step or `mindspore.train.Model`."""
from contextlib import suppress
from itertools import islice

from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

from ms_accum import FlushCallback
from ms_accum.selftest import drivers


class Driver(drivers.Driver):
    """A driver as a context in which its calls are made.

    Args:
        name: As there; or "model", followed by how it runs.
        loops: Whether a train step loops over `epoch`. Otherwise it is called.
        sink: Whether a model sinks its data.
        others: As there.
    """

    def __init__(self, name, *others, loops=False, sink=False, **options):
        self.loops, self.sink, self.logs = loops, sink, ()
        super().__init__(name, *others, **options)

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

"""The drivers of `ms-accum selftest`, and those of a training with `mindspore.train.Model`."""
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

from ms_accum import FlushCallback
from ms_accum.selftest import drivers
from support import reference


def counters(accumulator):
    """What it counts, by name, as `reference.Accumulation.counters` has it."""
    return {name: getattr(accumulator.window, name).asnumpy().item() for name in (*reference.COUNTERS, "seen")}


class Driver(drivers.Driver):
    """A driver, as a context in which its calls are made.

    Args:
        name: As there; or "model", followed by how it runs.
        sink: Whether a model sinks its data.
        others: As there.
    """

    def __init__(self, name, *others, sink=False, **options):
        self.sink = sink
        super().__init__(name, *others, **options)

    def epoch(self, batches, after=lambda result: None, flush=True):
        """Train on microbatches as a script with a model or a step does. `after` gets what each returned."""
        if self.kind == "model":
            dataset = GeneratorDataset(batches, ["x", "ids", "target", "mask"], shuffle=False)
            callbacks = [_After(after), *([FlushCallback()] if flush else [])]
            Model(self.step).train(1, dataset, callbacks=callbacks, dataset_sink_mode=self.sink)
        else:
            for result in self.step.epoch(batches):
                after(result)


class _After(Callback):
    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_step_end(self, run_context):
        self.after(run_context.original_args().net_outputs)

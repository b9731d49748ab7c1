"""The drivers: every way in which microbatches reach an accumulator, for all tests that compare whole runs."""
import mindspore as ms
from mindspore import Tensor, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

from ms_accum import FlushCallback, TrainOneStepCell, make_train_step
from support import reference
from support.modes import running


def counters(accumulator):
    """What it counts, by name, as `reference.Accumulation.counters` has it."""
    return {name: getattr(accumulator, name).asnumpy().item() for name in (*reference.COUNTERS, "seen")}


class Driver:
    """A driver of an accumulator, as a context in which its calls are made.

    Args:
        name: "hand", "step", "ahead" (a step with several losses, which knows a window before it is trained), "cell"
            or "model"; then how it runs: "-jit" or nothing, "-graph" (in graph mode) or "-pynative".
        accumulator: What it feeds.
        forward_fn: Returns the loss of a batch. A Cell for "cell" and "model".
        weight_fns: What weighs a microbatch, in turn; None: its samples.
        divisor: By hand, what gradients are divided by, as `reduction="sum"` wants it.
        sink: Whether a model sinks its data.
        options: Of `make_train_step`.
    """

    def __init__(self, name, accumulator, forward_fn, weight_fns=(None,), divisor=1.0, sink=False, **options):
        self.kind, self.mode = name.split("-") if "-" in name else (name, "jit")
        self.accumulator, self.forward_fn, self.divisor, self.options = accumulator, forward_fn, divisor, options
        self.weight_fns, self.sink, self.calls = weight_fns, sink, 0
        self.build()

    def build(self):
        """Compile everything again from now on."""
        self.steps = [self._step(weight_fn) for weight_fn in self.weight_fns]
        self._flush_by_hand = self._as_it_runs(self._close)
        self._empty_by_hand = self._as_it_runs(self._add_nothing)

    def __enter__(self):
        self._context = running(self.mode)
        self._context.__enter__()
        return self

    def __exit__(self, *raised):
        return self._context.__exit__(*raised)

    def __call__(self, *batch):
        """Train on a microbatch of arrays. By hand, nothing is differentiated if it has no rows."""
        self.calls += 1
        if self.kind == "hand" and not len(batch[0]):
            loss = self._empty_by_hand()
        else:
            loss = self.steps[self.calls % len(self.steps)](*map(Tensor, batch))
        if self.kind == "hand":
            self.accumulator.require_progress()
        return loss

    def epoch(self, batches, after=lambda result: None, flush=True):
        """Train on microbatches as a script with a model or a step does. `after` gets what each returned."""
        if self.kind == "model":
            dataset = GeneratorDataset(batches, ["x", "ids", "target", "mask"], shuffle=False)
            callbacks = [_After(after), *([FlushCallback()] if flush else [])]
            Model(self.steps[0]).train(1, dataset, callbacks=callbacks, dataset_sink_mode=self.sink)
        else:
            for result in self.steps[0].epoch(batches):
                after(result)

    def flush(self):
        """Apply the incomplete window, if one is open. Return whether a window was closed."""
        if self.kind != "hand":
            return bool(self.steps[0].flush())
        if self.mode == "pynative" or self.accumulator.exchange.ranks > 1:
            return self.accumulator.flush()
        closed = bool(self._flush_by_hand())
        self.accumulator.require_progress()
        return closed

    def _close(self):
        return self.accumulator.close_if(self.accumulator.mini_step > 0)

    def _add_nothing(self):
        return ops.depend(Tensor(0.0), self.accumulator(self.accumulator.weights, 0.0))

    def _step(self, weight_fn):
        if self.kind == "hand":
            return self._as_it_runs(self._by_hand(weight_fn))
        if self.kind in ("step", "ahead"):
            return make_train_step(self.forward_fn, self.accumulator, weight_fn=weight_fn, **self.options)
        return TrainOneStepCell(self.forward_fn, self.accumulator, batch_axis=self.options.get("batch_axis", 0),
                                weight_fn=weight_fn, loss_reduction=self.options.get("loss_reduction", "mean"))

    def _as_it_runs(self, function):
        return function if self.mode == "pynative" else ms.jit(function)

    def _by_hand(self, weight_fn):
        accumulator, forward_fn, divisor = self.accumulator, self.forward_fn, self.divisor

        def scaled(*batch):
            loss = forward_fn(*batch)
            return accumulator.scaled(loss), loss

        grad_fn = ms.value_and_grad(scaled, None, accumulator.weights, has_aux=True)

        def train_step(*batch):
            (_, loss), grads = grad_fn(*batch)
            if divisor != 1:
                grads = tuple([g / divisor for g in grads])
            weight = batch[0].shape[0] if weight_fn is None else weight_fn(*batch)
            return ops.depend(loss, accumulator(grads, weight))

        return train_step


class _After(Callback):
    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_step_end(self, run_context):
        self.after(run_context.original_args().net_outputs)

"""The same run with ms_accum, under each of its drivers."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, ops

from ms_accum import DataParallel, load_checkpoint, save_checkpoint, shard_parameters
from ms_accum.batch_size import GradientNoiseScale
from ms_accum.core.optimizers import divided_state, own_name
from ms_accum.selftest.comparing import values
from support.drivers import Driver, counters

from .networks import Transposed, Weighed, build_loss
from .optimizers import build_optimizer, state_of


def samples_of(*piece):
    return piece[3].shape[0] * 2.5


def tensor_samples_of(*piece):
    return ops.ones_like(piece[3]).sum()


def mask_of(*piece):
    return piece[3].sum()


def once(*piece):
    return 1.0


def weight_fn_of(case):
    """What counts a piece."""
    if case.weight == "returned":
        return None
    if case.reduction == "sum":
        return once
    if case.loss == "masked":
        return mask_of
    return {"samples": None, "number": samples_of, "tensor": tensor_samples_of}[case.weight]


class Accumulating:
    """A run of a Case with ms_accum. Its calls are made in the context of its driver.

    The options are those of an Accumulator.
    """

    def __init__(self, case, seed, **options):
        self.case = case
        per_row = case.row_weight if case.loss_reduction == "sum" else None
        self.loss = build_loss(case, seed, per_row)
        options.setdefault("reducer", DataParallel() if case.seed % 3 else None)  # alike without other ranks
        zero = getattr(options["reducer"], "zero", 0)
        self.optimizer = build_optimizer(case, self.loss.trainable_params(), shard_parameters if zero else list)
        self.scaler = None
        if case.scaler is not None:
            kind, exponent, *window = case.scaler
            scale = 2.0**exponent
            self.scaler = amp.StaticLossScaler(scale) if kind == "static" else amp.DynamicLossScaler(scale, 2, *window)
        self.noise_scale = GradientNoiseScale() if case.noise_scale else None
        settings = {
            "clip_norm": case.clip_norm, "on_nonfinite": case.on_nonfinite,
            "stages": () if self.noise_scale is None else (self.noise_scale,),
            "buffer_dtype": getattr(ms, case.buffer_dtype or "", None), "loss_scaler": self.scaler, **options}
        self.driver = Driver(
            case.driver, self._forward(), self.optimizer, case.schedule, weight_fn_of(case), sink=bool(case.seed % 2),
            divisor=float(case.accumulate_step) if case.reduction == "sum" else 1.0, reduction=case.reduction,
            settings=settings, batch_axis=case.batch_axis, pieces=case.pieces, has_aux=case.aux,
            loss_reduction=case.loss_reduction, has_weight=case.weight == "returned")
        self.accumulator = self.driver.accumulator

    def _forward(self):
        loss = Transposed(self.loss) if self.case.batch_axis else self.loss
        returns_weight = self.case.weight == "returned"
        if returns_weight:
            loss = Weighed(loss, mask_of if self.case.loss == "masked" else tensor_samples_of)

        def with_aux(x, ids, target, mask):
            returned, aux = loss(x, ids, target, mask), (ids, mask, mask.mean())
            return (returned[0], returned[1], aux) if returns_weight else (returned, aux)
        function = with_aux if self.case.aux else loss
        return self._declared(function) if self.case.declared else function

    def _declared(self, function):
        """A function that takes any number of rows, as MindSpore declares it."""
        shapes = [(None, *array.shape[1:]) for array in self.case.batch(0)]
        shapes = [shape[::-1] if self.case.batch_axis else shape for shape in shapes]
        given = {name: Tensor(shape=[*shape], dtype=ms.int32 if name == "ids" or (name == "target" and len(shape) == 1)
                              else ms.float32) for name, shape in zip(("x", "ids", "target", "mask"), shapes)}
        if self.case.aux:
            return ms.enable_dynamic(**given)(function)
        function.set_inputs(**given)
        return function

    def train(self, batches, after=lambda loss, aux: None, last=False):
        """Train on microbatches, and call `after(loss, aux)` after each. `last`: whether the epoch ends with them."""
        def read(result):
            """The loss and aux; or what a cell with a loss scaler says beside the loss."""
            losses, aux = result if self.case.aux else (result, ())
            losses = losses if isinstance(losses, (tuple, list)) else (losses,)
            loss, *self.said = [float(loss.asnumpy()) for loss in losses]
            after(loss, self._turned(part.asnumpy() for part in aux or ()))

        batches = [self._turned(batch) for batch in batches]
        if self.driver.kind == "model":
            self.driver.epoch(batches, read, flush=last)
        else:
            for batch in batches:
                read(self.driver(*batch))

    def evaluate(self, batches):
        return self.driver.step.evaluate([self._turned(batch) for batch in batches])

    def _turned(self, arrays):
        """Samples along `batch_axis`, or back."""
        return [array.T if self.case.batch_axis else array for array in arrays]

    def facts(self):
        """What is compared, as plain values."""
        scaler, noise, accumulator = self.scaler, self.noise_scale, self.accumulator
        return {
            "counters": counters(accumulator), "grad_norm": float(accumulator.grad_norm),
            "parameters": values(self.loss.trainable_params()), "state": self._whole_state(),
            "noise": noise and [noise.noise, noise.gradient_squared],
            "scaler": scaler and [float(scaler.scale_value), int(getattr(scaler, "counter", 0))]}

    def _whole_state(self):
        return [np.array(array, np.float64) for array in map(self._whole, state_of(self.optimizer))]

    def _whole(self, state):
        """State as an array, without what fills up slices."""
        wholes = divided_state(self.optimizer)
        return self.accumulator.exchange.joined(state, wholes[id(state)]) if id(state) in wholes else state.asnumpy()

    def bits(self):
        """Every bit of state."""
        parameters = (*self.loss.get_parameters(), *state_of(self.optimizer), *self.accumulator.state.values())
        return {own_name(self.optimizer, p.name): self._whole(p).tobytes() for p in parameters}

    def open_window(self):
        """Every bit of the window."""
        state = (*self.accumulator.window.buffers, self.accumulator.weight_sum, self.accumulator.mini_step)
        return [p.asnumpy().tobytes() for p in state]

    def save(self, path, position):
        save_checkpoint(path, self.loss, self.accumulator, extra={"position": position})

    def load(self, path):
        return load_checkpoint(path, self.loss, self.accumulator)["position"]

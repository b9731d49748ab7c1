"""The same run with ms_accum, under each of its drivers."""

import mindspore as ms
from mindspore import Tensor, amp, ops

from ms_accum import DataParallel, WindowLog, load_checkpoint, save_checkpoint
from ms_accum.batch_size import GradientNoiseScale
from ms_accum.selftest.comparing import values
from support.drivers import Driver

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
    if case.reduction == "sum":
        return once
    if case.loss == "masked" and case.weight != "returned":
        return mask_of
    return {"samples": None, "returned": None, "number": samples_of, "tensor": tensor_samples_of}[case.weight]


class Accumulating:
    """A run of a Case with ms_accum. Its calls are made in the context of its driver.

    The options are those of an Accumulator.
    """

    def __init__(self, case, seed, **options):
        self.case = case
        per_row = case.row_weight if case.loss_reduction == "sum" else None
        self.loss = build_loss(case, seed, per_row)
        self.optimizer = build_optimizer(case, self.loss.trainable_params())
        self.scaler = None
        if case.scaler is not None:
            kind, exponent, *window = case.scaler
            scale = 2.0**exponent
            self.scaler = amp.StaticLossScaler(scale) if kind == "static" else amp.DynamicLossScaler(scale, 2, *window)
        self.noise_scale = GradientNoiseScale() if case.noise_scale else None
        options = {"clip_norm": case.clip_norm, "min_weight": case.min_weight,
                   "on_nonfinite": case.on_nonfinite, "loss_scaler": self.scaler,
                   "buffer_dtype": getattr(ms, case.buffer_dtype or "", None),
                   "stages": () if self.noise_scale is None else (self.noise_scale,),
                   "reducer": DataParallel() if case.seed % 3 else None, **options}  # alike without other ranks
        self.driver = Driver(
            case.driver, self._forward(), self.optimizer, case.schedule, weight_fn_of(case),
            float(case.accumulate_step) if case.reduction == "sum" else 1.0, case.reduction, options,
            loops=case.loops, sink=bool(case.seed % 2), batch_axis=case.batch_axis, pieces=case.pieces,
            has_aux=case.aux, loss_reduction=case.loss_reduction, has_weight=case.weight == "returned")
        self.boundary = self.driver.boundary
        self.window = self.boundary.window

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

    def train(self, batches, skip=0, end=None, after=lambda loss, aux: None):
        """Train on an epoch of microbatches, from number `skip` to `end`, and call `after(loss, aux)` after each.

        If `end` is None, a model and a loop end the epoch.
        """
        def read(result):
            """The loss and aux; or what a cell with a loss scaler says beside the loss."""
            losses, aux = result if self.case.aux else (result, ())
            losses = losses if isinstance(losses, (tuple, list)) else (losses,)
            loss, *self.said = [float(loss.asnumpy()) for loss in losses]
            after(loss, self.turned(part.asnumpy() for part in aux or ()))

        batches = [self.turned(batch) for batch in batches]
        self.driver.epoch(batches, skip, None if end is None else end - skip, read)

    def log(self, path, rows):
        """From now on, write a row for each update into a file, and into a list."""
        if self.case.logs:
            self.driver.log(WindowLog(path), WindowLog(rows.append))

    def turned(self, arrays):
        """Samples along `batch_axis`, or back."""
        return [array.T if self.case.batch_axis else array for array in arrays]

    def facts(self):
        """What is compared, as plain values."""
        scaler, noise = self.scaler, self.noise_scale
        return {
            "status": self.boundary.status()._asdict(),
            "parameters": values(self.loss.trainable_params()), "state": values(state_of(self.optimizer)),
            "noise": noise and [noise.noise, noise.gradient_squared],
            "scaler": scaler and [float(scaler.scale_value), int(getattr(scaler, "counter", 0))]}

    def bits(self):
        """Every bit of state, by name."""
        window = self.window
        state = {**dict(self.loss.parameters_and_names()), **self.boundary.rates.state, **window.state,
                 "counts": window.counts, "sums": window.sums}
        return {name: p.asnumpy().tobytes() for name, p in state.items()}

    def open_window(self):
        """Every bit of the window."""
        return [p.asnumpy().tobytes() for p in (*self.window.buffers, self.window.counts, self.window.sums)]

    def save(self, path, position):
        save_checkpoint(path, self.loss, self.driver.accumulator, extra={"position": position})

    def load(self, path):
        return load_checkpoint(path, self.loss, self.driver.accumulator)["position"]

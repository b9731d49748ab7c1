"""Plain MindSpore on the undivided batches of the windows: `value_and_grad` and the optimizer, op by op.

What a window is, the oracle says. Shares no code with ms_accum.
"""
import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_accum.selftest.comparing import values
from support import reference
from support.modes import running

from .networks import build_loss
from .optimizers import COMPILED_ONLY, build_optimizer, multiply_rates

LARGEST = 2.0**127
DIVERGED = 1e6  # a loss, before its factor


class Plain(reference.Undivided):
    """The run of a Case as a script without accumulation would do it, window by window."""

    def __init__(self, case):
        self.case = case
        self.loss = build_loss(case, case.seed)
        optimizer = build_optimizer(case, self.loss.trainable_params())
        # A scaler drops windows, too.
        on_nonfinite = case.on_nonfinite if case.scaler is None else "skip_window"
        super().__init__(values(self.loss.trainable_params()), optimizer, case.schedule, case.reduction,
                         case.clip_norm, on_nonfinite)
        self.zeros = [np.zeros(p.shape) for p in optimizer.parameters]
        self.divisor = case.accumulate_step  # each loss is divided by the length of a full window
        self.measures, self.min_weight = case.noise_scale, case.min_weight or 0.0
        self._compile_optimizer()
        self.scale, self.finite_windows = 2.0 ** case.scaler[1] if case.scaler else 1.0, 0
        self.dropped, self.diverged, self.window_loss = False, False, 0.0
        self.path = [0.0] * len(self.parameters)  # how far each parameter has moved
        self.rounding = 0.0

    @property
    def parameters(self):
        return values(self.loss.trainable_params())

    @parameters.setter
    def parameters(self, arrays):
        for parameter, value in zip(self.loss.trainable_params(), arrays):
            ops.assign(parameter, Tensor(value, parameter.dtype))

    def microbatch(self, batch):
        """Take a microbatch. Return its loss, and what it has beside."""
        pieces = self.case.pieces_of(batch)
        losses = [self.value(piece) if len(batch[0]) and (weight or self.case.by_hand) else 0.0
                  for piece, weight in pieces]
        taken = {id(piece) for piece in self.add_pieces(pieces)}
        self.losses += [(weight, loss) for (piece, weight), loss in zip(pieces, losses)
                        if weight and id(piece) in taken]
        if not len(batch[0]):
            return 0.0, ()
        counts = np.array([weight for _, weight in pieces], float)
        loss = losses[0] if len(pieces) == 1 else _mean([pair for pair in zip(counts, losses) if pair[0]])
        loss *= 1.0 if self.case.by_hand or not counts.any() else self.share(counts.sum())
        counts = counts if self.case.pieces > 1 and counts.any() else np.ones(len(pieces))
        return loss, (batch[1], batch[3], np.average([piece[3].mean() for piece, _ in pieces], weights=counts))

    def begin(self):
        super().begin()
        self.losses = []  # of the open window: (weight, loss)

    def value(self, batch):
        with running("pynative"):
            return float(self.loss(*map(Tensor, batch)).asnumpy())

    def evaluated(self):
        """The loss of the undivided data of an evaluation; None if some weight is 0, or it diverges."""
        whole = tuple(map(np.concatenate, zip(*self.case.evaluation())))
        weight = self.case.weight_of(whole)
        loss = self.value(whole) * self.share(weight) if weight else np.inf
        return loss if abs(loss) < DIVERGED * self.case.factor else None

    def multiply_rate(self, factor):
        multiply_rates(self.optimizer, factor)
        self._compile_optimizer()

    def _compile_optimizer(self):
        """Anew: a graph may hold the rate as a constant."""
        def run(gradients):
            return optimizer(gradients)

        optimizer = self.optimizer
        self.run_optimizer = ms.jit(run) if self.case.optimizer in COMPILED_ONLY else optimizer

    def gradients_of(self, piece):
        """Of the mean loss of a batch, as it comes out of MindSpore for a loss times the scale."""
        scale = self.scale

        def scaled_loss(*batch):
            return self.loss(*batch) * scale

        with running("pynative"):
            _, gradients = ms.value_and_grad(scaled_loss, None, self.optimizer.parameters)(*map(Tensor, piece))
            return [g.asnumpy().astype(np.float64) / scale for g in gradients]

    def close(self, dropped):
        """Update with the window. `dropped`: whether the other side dropped it, which counts where it may do either."""
        self.dropped = dropped
        self.apply()

    def apply(self):
        updates = self.update_step
        self.window_loss = _mean(self.losses) * self.share(self.weight_sum)
        super().apply()
        if self.case.scaler is not None:
            self._adjust(self.update_step > updates)

    def has_taken(self):
        return any(self.case.by_hand or len(piece[0]) for _, piece in self.window)

    def accepts(self, gradient):
        largest = max(np.abs(g).max() for g in gradient) * self.scale * max(self.weight_sum, 1)
        if self.case.scaler is not None and np.isfinite(largest) and largest * 8 > LARGEST:
            return not self.dropped
        return super().accepts(gradient)

    def update(self, gradient):
        if not self.case.exact and all(np.isfinite(g).all() for g in gradient) and self.weight_sum > 0:
            self.rounding = max(self.rounding, self._rounding(gradient))
        super().update(gradient)

    def move(self, gradient):
        given = tuple(Tensor(g.astype(np.float32)).astype(p.dtype) for g, p in zip(gradient, self.optimizer.parameters))
        before = self.parameters
        if self.case.optimizer in COMPILED_ONLY:
            self.run_optimizer(given)
        else:
            with running("pynative"):
                self.run_optimizer(given)
        self.path = [length + np.abs(p - old).max() for length, old, p in zip(self.path, before, self.parameters)]
        self.diverged = not np.isfinite(self.path).all()

    def noise(self):
        """The noise scale's two numbers, and what their rounding errors are relative to."""
        windows = [window for window in self.measured if len(window) > 1]
        size = max(sum(w * (g**2).sum() for g, w in window) / (len(window) - 1) for window in windows)
        return reference.noise_and_signal(self.measured, 0.99), size

    def _rounding(self, gradient):
        """How far the mean of plain MindSpore's gradients of the pieces is off that of the whole, relative to it."""
        means = super(reference.Undivided, self).gradient()
        tenth = 0.1 * max(np.abs(g).max() for g in gradient)
        if tenth == 0:
            return 0.0
        return max(np.abs(m - g).max() / (np.abs(g).max() + tenth) for m, g in zip(means, gradient))

    def _adjust(self, finite):
        if self.case.scaler[0] == "dynamic":
            self.finite_windows = self.finite_windows + 1 if finite else 0
            if not finite:
                self.scale = max(self.scale / 2, 1.0)
            elif self.finite_windows == self.case.scaler[2]:
                self.scale, self.finite_windows = self.scale * 2, 0


def _mean(losses):
    """Of (weight, loss)."""
    return sum(weight * loss for weight, loss in losses) / (sum(weight for weight, _ in losses) or 1.0)

"""Plain MindSpore on the undivided batches of the windows: `value_and_grad`, the clip formula and the optimizer, op by op.

Shares no code with ms_accum.
"""
from contextlib import contextmanager

import mindspore as ms
import numpy as np
import pytest
import reference
from mindspore import Tensor

from .networks import build_loss
from .optimizers import COMPILED_ONLY, build_optimizer

LARGEST = 2.0**127


@contextmanager
def op_by_op():
    mode = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MS_JIT", "0")
            yield
    finally:
        ms.set_context(mode=mode)


class Plain:
    """The run of a Case as a script without accumulation would do it, window by window."""

    def __init__(self, case):
        self.case = case
        self.loss = build_loss(case, case.seed)
        self.optimizer = build_optimizer(case, self.loss.trainable_params())
        self.update = ms.jit(self.optimizer) if case.optimizer in COMPILED_ONLY else self.optimizer
        self.mini_step = self.update_step = self.skipped = self.closed_windows = 0
        self.grad_norm, self.window_weight = np.nan, 0.0
        self.window = []
        self.scale, self.finite_windows = 1.0, 0
        if case.scaler is not None:
            self.scale = 2.0 ** case.scaler[1]
        self.noise_totals, self.noise_error = np.zeros(3), 0.0
        self.diverged = False
        self.path = [0.0] * len(self.loss.trainable_params())
        self.averages = [p.asnumpy().astype(np.float64) for p in self.loss.trainable_params()]
        self.rounding = 0.0

    @property
    def _nothing(self):
        return np.zeros(2) if self.case.loss == "pair" else 0.0

    @property
    def weight_sum(self):
        """The weights in the window; of a pair, how many of its pieces have any."""
        if self.case.loss == "pair":
            return float(sum(np.any(weight) for _, weight in self.window))
        return float(sum(weight for _, weight in self.window))

    @property
    def first_weight(self):
        """What a budget counts."""
        return sum(np.ravel(weight)[0] for _, weight in self.window)

    def microbatch(self, batch):
        """Take a microbatch: its loss, and whether the window is full."""
        case = self.case
        n = len(batch[0])
        rows = -(-n // case.pieces)
        pieces = [tuple(part[i:i + rows] for part in batch) for i in range(0, n, rows)]
        taken, losses = 0, []
        for piece in pieces:
            weight = self.weight(piece)
            loss = self.value(piece)
            losses.append((weight, np.where(np.equal(weight, 0), 0.0, loss)))
            if np.any(weight) and case.on_nonfinite == "skip_microbatch" and not np.isfinite(piece[0]).all():
                self.skipped += 1
                continue
            taken = 1
            self.window.append((piece, weight))
        self.mini_step += taken
        if case.pieces == 1 and case.loss != "pair":
            loss = self.value(batch)
        else:
            total = sum(w for w, _ in losses)
            loss = sum(w * value for w, value in losses) / np.where(total == 0, 1.0, total)
        self.aux = batch[1], np.average([piece[3].mean() for piece in pieces], weights=self._first_of(losses, case.pieces))
        return loss, self._full()

    def _first_of(self, losses, pieces):
        """What the means over the pieces of a microbatch are weighed with."""
        weights = np.array([np.ravel(weight)[0] for weight, _ in losses], float)
        return weights if pieces > 1 and weights.any() else np.ones(len(losses))

    def _full(self):
        if self.case.budget is None:
            return self.mini_step >= reference.window_length(self.case.schedule, self.update_step)
        return self.mini_step >= self.case.accumulate_step[2] or self.first_weight >= self.case.budget

    def weight(self, piece):
        if self.case.loss == "masked":
            return float(piece[3].sum())
        if self.case.loss == "pair":
            return np.array([piece[3].sum(), (piece[1][:, 0] == 0).sum()], float)
        if self.case.reduction == "sum":
            return 1.0
        return len(piece[0]) * (2.5 if self.case.weight == "number" else 1.0)

    def value(self, batch):
        with op_by_op():
            loss = self.loss(*map(Tensor, batch))
            return np.array([float(one) for one in loss]) if isinstance(loss, tuple) else float(loss.asnumpy())

    def gradients(self, batch, scale=1.0):
        """Of the mean loss of a batch (of a pair, of the sum of those that are means over something), as it comes out of MindSpore
        for a loss times `scale`."""
        counted = np.flatnonzero(self.weight(batch)).tolist()

        def scaled_loss(*batch):
            loss = self.loss(*batch)
            return (loss if self.case.loss != "pair" else sum(loss[i] for i in counted)) * scale

        with op_by_op():
            grad_fn = ms.value_and_grad(scaled_loss, None, self.optimizer.parameters)
            _, gradients = grad_fn(*map(Tensor, batch))
            return [g.asnumpy().astype(np.float64) / scale for g in gradients]

    def close(self, dropped):
        """Update with the window. `dropped`: whether the other side dropped it, which counts where it may do either."""
        present = [piece for piece, weight in self.window if np.any(weight)]
        weight = np.max(sum([weight for _, weight in self.window], self._nothing))
        gradients = [np.zeros(p.shape) for p in self.optimizer.parameters]
        if present:
            gradients = self.gradients(tuple(map(np.concatenate, zip(*present))), self.scale)
        if self.case.reduction == "sum":  # each loss is divided by the length of a full window
            gradients = [g * len(self.window) / self.case.accumulate_step for g in gradients]
        finite = all(np.isfinite(g).all() for g in gradients)
        if self.case.scaler is not None and finite:
            largest = max(np.abs(g).max() for g in gradients) * self.scale
            finite = not dropped if largest * max(weight, 1) * 8 > LARGEST else True
        if (self.case.on_nonfinite == "skip_window" or self.case.scaler is not None) and not finite:
            self.skipped += 1
        else:
            self._update(gradients, weight)
        if self.case.scaler is not None:
            self._adjust(finite)
        self.window_weight = self.weight_sum
        self.closed_windows += 1
        self.mini_step, self.window = 0, []

    def _update(self, gradients, weight):
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        if not self.case.exact and np.isfinite(norm) and weight > 0:
            self.rounding = max(self.rounding, self._rounding(gradients, weight))
        if self.case.noise_scale:
            self._measure(gradients, weight)
        if self.case.clip_norm is not None:
            self.grad_norm = norm
            factor = min(1.0, self.case.clip_norm / (norm + 1e-6))
            gradients = [g * factor for g in gradients]
        before = [p.asnumpy().copy() for p in self.loss.trainable_params()]
        given = tuple(Tensor(g.astype(np.float32)).astype(p.dtype) for g, p in zip(gradients, self.optimizer.parameters))
        if self.case.optimizer in COMPILED_ONLY:
            self.update(given)
        else:
            with op_by_op():
                self.update(given)
        self.path = [length + float(np.abs(p.asnumpy().astype(float) - old).max())
                     for length, old, p in zip(self.path, before, self.loss.trainable_params())]
        self.diverged = not np.isfinite(self.path).all()
        self.averages = [0.5 * average + 0.5 * p.asnumpy() for average, p in zip(self.averages, self.loss.trainable_params())]
        self.update_step += 1

    def _rounding(self, gradients, weight):
        """How far the mean of plain MindSpore's gradients of the pieces is off that of the whole: what 16 bits lose, relative to it."""
        pieces = [(w / weight, self.gradients(piece, self.scale)) for piece, w in self.window if w != 0]
        scale = len(self.window) / self.case.accumulate_step if self.case.reduction == "sum" else 1.0
        means = [scale * sum(w * piece[i] for w, piece in pieces) for i in range(len(gradients))]
        longest = max(np.abs(g).max() for g in gradients)
        return max(np.abs(m - g).max() / (np.abs(g).max() + 0.1 * longest) for m, g in zip(means, gradients)) if longest else 0.0

    def _adjust(self, finite):
        if self.case.scaler[0] == "dynamic":
            if finite:
                self.finite_windows += 1
                if self.finite_windows == self.case.scaler[2]:
                    self.scale, self.finite_windows = self.scale * 2, 0
            else:
                self.scale, self.finite_windows = max(self.scale / 2, 1.0), 0

    def _measure(self, gradients, weight):
        pieces = [(w, self.gradients(piece)) for piece, w in self.window if w != 0]
        others = len(pieces) - 1
        if others > 0:
            noise = sum(w * sum(((g - m)**2).sum() for g, m in zip(piece, gradients)) for w, piece in pieces) / others
            squared = sum((g**2).sum() for g in gradients)
            self.noise_totals = self.noise_totals * 0.99 + others * np.array([noise, squared - noise / weight, 1.0])
            self.noise_error = max(self.noise_error, sum(w * sum((g**2).sum() for g in piece) for w, piece in pieces) / others)

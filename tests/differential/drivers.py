"""The same run with ms_accum, under each of its drivers."""
import os

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

from ms_accum import (
    Accumulator,
    FlushCallback,
    GradientNoiseScale,
    TrainOneStepCell,
    load_checkpoint,
    make_train_step,
    save_checkpoint,
)

from .networks import build_loss
from .optimizers import build_optimizer


def samples_of(*piece):
    return piece[0].shape[0] * 2.5


def tensor_samples_of(*piece):
    return ops.ones_like(piece[3]).sum()


def mask_of(*piece):
    return piece[3].sum()


def masks_of(*piece):
    return piece[3].sum(), (piece[1][:, 0] == 0).sum()


def weight_fns_of(case):
    """What counts a piece, in turn."""
    if case.loss in ("masked", "pair"):
        return (mask_of,) if case.loss == "masked" else (masks_of,)
    return {"samples": (None,), "number": (samples_of,), "tensor": (tensor_samples_of,), "mixed": (None, tensor_samples_of)}[case.weight]


class Accumulating:
    """A run of a Case with ms_accum."""

    def __init__(self, case, seed):
        self.case = case
        self.loss = build_loss(case, seed)
        self.optimizer = build_optimizer(case, self.loss.trainable_params())
        self.scaler = None
        if case.scaler is not None:
            kind, exponent, *window = case.scaler
            self.scaler = amp.StaticLossScaler(2.0**exponent) if kind == "static" else amp.DynamicLossScaler(2.0**exponent, 2, *window)
        self.noise_scale = GradientNoiseScale() if case.noise_scale else None
        self.accumulator = Accumulator(self.optimizer, case.schedule, case.clip_norm, reduction=case.reduction,
                                       on_nonfinite=case.on_nonfinite, noise_scale=self.noise_scale,
                                       losses=2 if case.loss == "pair" else 1)
        self.calls = 0
        self.build_step()

    def build_step(self):
        """New drivers for the same accumulator, one for each way to weigh."""
        self.steps = [self._step(weight_fn) for weight_fn in weight_fns_of(self.case)]

    def _step(self, weight_fn):
        case, acc = self.case, self.accumulator
        driver = case.driver.split("-")[0]
        if driver == "hand":
            return self._by_hand(weight_fn)
        if driver in ("fused", "split", "ahead"):
            return make_train_step(self._forward(), acc, micro_size=case.micro_size, weight_fn=weight_fn, loss_scaler=self.scaler,
                                   strategy="fused" if driver == "fused" else "split")
        return TrainOneStepCell(self.loss, acc, loss_scaler=self.scaler, micro_size=case.micro_size, weight_fn=weight_fn)

    def _forward(self):
        loss = self.loss

        def forward_fn(x, ids, target, mask):
            return loss(x, ids, target, mask)
        return forward_fn

    def _by_hand(self, weight_fn):
        acc, case = self.accumulator, self.case
        if case.loss == "pair":
            return self._pair_by_hand(weight_fn)
        grad_fn = ms.value_and_grad(self._forward(), None, acc.optimizer.parameters)
        divisor = float(case.accumulate_step) if case.reduction == "sum" else 1.0

        def train_step(x, ids, target, mask):
            loss, grads = grad_fn(x, ids, target, mask)
            if divisor != 1:
                return ops.depend(loss, acc(tuple([g / divisor for g in grads])))
            if weight_fn is None:
                return ops.depend(loss, acc(grads, x.shape[0]))
            return ops.depend(loss, acc(grads, weight_fn(x, ids, target, mask)))

        return ms.jit(train_step) if case.compiled else train_step

    def _pair_by_hand(self, weight_fn):
        acc, loss = self.accumulator, self.loss

        def one(*batch):
            return loss(*batch)[0]

        def other(*batch):
            return loss(*batch)[1]

        grad_fns = [ms.value_and_grad(fn, None, acc.optimizer.parameters) for fn in (one, other)]

        def train_step(*batch):
            (first, grads), (second, other_grads) = grad_fns[0](*batch), grad_fns[1](*batch)
            closed = acc((grads, other_grads), weight_fn(*batch))
            return ops.depend(first, closed), second

        return ms.jit(train_step) if self.case.compiled else train_step

    def __enter__(self):
        case = self.case
        ms.set_context(mode=ms.GRAPH_MODE if case.driver.endswith("graph") else ms.PYNATIVE_MODE)
        if case.driver in ("fused-pynative", "split-pynative", "ahead-pynative"):
            os.environ["MS_JIT"] = "0"
        return self

    def __exit__(self, *_):
        ms.set_context(mode=ms.PYNATIVE_MODE)
        os.environ.pop("MS_JIT", None)

    def train(self, batches, after, last=False):
        """Train on microbatches; `after(loss)` is called after each one. `last`: whether they are the last ones of an epoch."""
        if self.case.driver.startswith("model"):
            dataset = GeneratorDataset(batches, ["x", "ids", "target", "mask"], shuffle=False)
            callbacks = [_After(self._value, after), *([FlushCallback()] if last else [])]
            Model(self.steps[0]).train(1, dataset, callbacks=callbacks, dataset_sink_mode=False)
            return
        if self.case.ahead:
            for losses in self.steps[0].epoch(batches, lookahead=True):
                after(self._value(losses))
            return
        for batch in batches:
            self.calls += 1
            after(self._value(self.steps[self.calls % len(self.steps)](*map(Tensor, batch))))

    def _value(self, result):
        """The loss, or both of a pair."""
        losses = result if isinstance(result, (tuple, list)) else (result,)
        return np.array([float(loss.asnumpy()) for loss in losses[:2]]) if self.case.loss == "pair" else float(losses[0].asnumpy())

    def flush(self):
        if not self.case.by_hand:
            return bool(self.steps[0].flush())

        def flush():
            return self.accumulator.flush()
        return bool(ms.jit(flush)() if self.case.compiled else flush())

    def save(self, path, position):
        save_checkpoint(path, self.loss, self.accumulator, extra={"position": position})

    def load(self, path):
        return load_checkpoint(path, self.loss, self.accumulator)["position"]


class _After(Callback):
    def __init__(self, value, after):
        super().__init__()
        self.value, self.after = value, after

    def on_train_step_end(self, run_context):
        self.after(self.value(run_context.original_args().net_outputs))

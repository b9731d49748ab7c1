"""The same run with ms_accum, under each of its drivers."""
import os

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

from ms_accum import (
    Accumulator,
    FlushCallback,
    TrainOneStepCell,
    load_checkpoint,
    make_train_step,
    save_checkpoint,
)
from ms_accum.batch_size import GradientNoiseScale

from .networks import build_loss
from .optimizers import build_optimizer, state_of


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


class Average(nn.Cell):
    """A moving average of the weights: a hook with state."""

    def __init__(self, weights):
        super().__init__()
        self.weights, self.averages = ms.ParameterTuple(weights), ms.ParameterTuple(weights).clone("average")

    def construct(self):
        for weight, average in zip(self.weights, self.averages):
            ops.assign(average, 0.5 * average + 0.5 * weight)


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
        self.hook = Average(self.loss.trainable_params()) if case.hook else None
        self.accumulator = Accumulator(
            self.optimizer, case.schedule, case.clip_norm, reduction=case.reduction, on_nonfinite=case.on_nonfinite,
            buffer_dtype=getattr(ms, case.buffer_dtype or "", None), after_update=self.hook, noise_scale=self.noise_scale,
            loss_scaler=self.scaler)
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
        if driver in ("step", "ahead"):
            return make_train_step(self._forward(case.aux), acc, pieces=case.pieces, weight_fn=weight_fn, losses=2 if case.ahead else 1,
                                   has_aux=case.aux)
        return TrainOneStepCell(self.loss, acc, weight_fn=weight_fn)

    def _forward(self, aux=False):
        loss = self.loss

        def forward_fn(x, ids, target, mask):
            return loss(x, ids, target, mask)

        def with_aux(x, ids, target, mask):
            return loss(x, ids, target, mask), (ids, mask.mean())
        return with_aux if aux else forward_fn

    def _by_hand(self, weight_fn):
        acc, case = self.accumulator, self.case
        forward = self._forward()

        def scaled(*batch):
            loss = forward(*batch)
            return acc.scaled(loss), loss

        grad_fn = ms.value_and_grad(scaled, None, acc.optimizer.parameters, has_aux=True)
        divisor = float(case.accumulate_step) if case.reduction == "sum" else 1.0

        def train_step(x, ids, target, mask):
            (_, loss), grads = grad_fn(x, ids, target, mask)
            if divisor != 1:
                return ops.depend(loss, acc(tuple([g / divisor for g in grads])))
            if weight_fn is None:
                return ops.depend(loss, acc(grads, x.shape[0]))
            return ops.depend(loss, acc(grads, weight_fn(x, ids, target, mask)))

        return ms.jit(train_step) if case.compiled else train_step

    def __enter__(self):
        case = self.case
        ms.set_context(mode=ms.GRAPH_MODE if case.driver.endswith("graph") else ms.PYNATIVE_MODE)
        if case.driver in ("step-pynative", "ahead-pynative"):
            os.environ["MS_JIT"] = "0"
        return self

    def __exit__(self, *_):
        ms.set_context(mode=ms.PYNATIVE_MODE)
        os.environ.pop("MS_JIT", None)

    def train(self, batches, after, last=False):
        """Train on microbatches; `after(loss, aux)` is called after each one. `last`: whether they are the last ones of an epoch."""
        if self.case.driver.startswith("model"):
            dataset = GeneratorDataset(batches, ["x", "ids", "target", "mask"], shuffle=False)
            callbacks = [_After(self._value, after), *([FlushCallback()] if last else [])]
            Model(self.steps[0]).train(1, dataset, callbacks=callbacks, dataset_sink_mode=bool(self.case.seed % 2))
            return
        if self.case.ahead and self.case.accumulate_step != 1:  # a single call is a window of its own
            for result in self.steps[0].epoch(batches):
                after(*self._value(result))
            return
        for batch in batches:
            self.calls += 1
            after(*self._value(self.steps[self.calls % len(self.steps)](*map(Tensor, batch))))

    def _value(self, result):
        """The loss, or both of a pair; and aux."""
        losses, aux = result if self.case.aux else (result, ())
        return self._losses(losses), [part.asnumpy() for part in aux]

    def _losses(self, losses):
        losses = losses if isinstance(losses, (tuple, list)) else (losses,)
        return np.array([float(loss.asnumpy()) for loss in losses[:2]]) if self.case.loss == "pair" else float(losses[0].asnumpy())

    def flush(self):
        if not self.case.by_hand:
            return bool(self.steps[0].flush())
        if self.case.compiled:
            accumulator = self.accumulator

            def flush():
                return accumulator.close_if(accumulator.mini_step > 0)
            return bool(ms.jit(flush)())
        return self.accumulator.flush()

    def bits(self):
        """Every bit of state."""
        parameters = (*self.loss.get_parameters(), *state_of(self.optimizer), *self.accumulator.state.values())
        return {p.name.partition(".")[2] if p.name.startswith("accumulator") else p.name: p.asnumpy().tobytes() for p in parameters}

    def save(self, path, position):
        save_checkpoint(path, self.loss, self.accumulator, extra={"position": position})

    def load(self, path):
        return load_checkpoint(path, self.loss, self.accumulator)["position"]


class _After(Callback):
    def __init__(self, value, after):
        super().__init__()
        self.value, self.after = value, after

    def on_train_step_end(self, run_context):
        self.after(*self.value(run_context.original_args().net_outputs))

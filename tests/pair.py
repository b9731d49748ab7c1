"""An accumulator and the oracle, which get the same calls."""
import mindspore as ms
import numpy as np
import reference
from conftest import values
from mindspore import Parameter, ParameterTuple, Tensor, nn

from ms_accum import Accumulator

SHAPES = ((2, 3), (), (4,))
OPTIMIZERS = {
    "sgd": (lambda p: nn.SGD(p, 0.125), lambda: reference.SGD(0.125)),
    "momentum": (lambda p: nn.Momentum(p, 0.125, 0.5), lambda: reference.SGD(0.125, 0.5)),
    "adam": (lambda p: nn.Adam(p, 0.125), lambda: reference.Adam(0.125)),
}
METHODS = ("__call__", "add", "apply", "flush", "reset", "close_if")


class Pair:
    """`ask[method]` are the accumulator's methods as functions that can be compiled; each returns whether a window closed."""

    def __init__(self, accumulate_step, reduction, clip_norm, on_nonfinite, optimizer, prefix="p"):
        ours, theirs = OPTIMIZERS[optimizer]
        names = [f"{prefix}{i}" for i in range(len(SHAPES))]
        self.weights = ParameterTuple([Parameter(Tensor(np.ones(shape), ms.float32), name) for name, shape in zip(names, SHAPES)])
        self.optimizer = ours(self.weights)
        self.ours = Accumulator(self.optimizer, accumulate_step, clip_norm, reduction=reduction, on_nonfinite=on_nonfinite)
        self.oracle = reference.Accumulation(values(self.weights), theirs(), accumulate_step, reduction, clip_norm, on_nonfinite)
        self.largest = 1.0
        self.ask = self.functions()

    def functions(self):
        ours = self.ours

        def call(weight, *grads):
            return ours(grads, weight)

        def add(weight, *grads):
            ours.add(grads, weight)
            return ours.mini_step < 0  # nothing closes

        def apply():
            ours.apply()
            return ours.mini_step < 0

        def flush():
            return ours.flush()

        def reset():
            ours.reset()
            return ours.mini_step < 0

        def close_if(condition):
            return ours.close_if(condition)

        return dict(zip(METHODS, (call, add, apply, flush, reset, close_if)))

    def microbatch(self, method, gradients, weight, given):
        """Add gradients to both; `given` is the weight in the form that ours gets it."""
        self.check(method, self.ask[method](given, *tensors_of(gradients)), gradients, weight)

    def close(self, method, *condition):
        """Call a method without gradients on both."""
        self.check(method, self.ask[method](*map(Tensor, condition)), *condition)

    def check(self, method, closed, *arguments):
        """Call the oracle's method and compare `closed`, which ours returned, and everything else."""
        assert bool(closed) == bool(getattr(self.oracle, method)(*arguments))
        ours, oracle = self.ours, self.oracle
        assert (int(ours.mini_step), int(ours.update_step), int(ours.skipped)) == (oracle.mini_step, oracle.update_step, oracle.skipped)
        assert int(self.optimizer.global_step.asnumpy().item()) == oracle.optimizer.calls
        np.testing.assert_allclose(float(ours.grad_norm), oracle.grad_norm, rtol=1e-5, atol=1e-6)
        if oracle.reduction == "mean":
            np.testing.assert_allclose(float(ours.weight_sum), sum(weight for weight, _ in oracle.window), rtol=1e-6)
        self.largest = max(self.largest, *(np.abs(p).max() for p in oracle.parameters))
        for got, expected in zip(values(self.weights), oracle.parameters):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * self.largest)


def tensors_of(gradients, dtype=ms.float32):
    return tuple([Tensor(gradient, dtype) for gradient in gradients])


def gradients_of(seed, bad=None):
    """Return small whole numbers; with `bad`, one element is NaN or infinite."""
    rng = np.random.default_rng(seed)
    gradients = [rng.integers(-3, 4, shape).astype(np.float64) for shape in SHAPES]
    if bad is not None:
        gradients[seed % 3].reshape(-1)[-1:] = bad
    return gradients

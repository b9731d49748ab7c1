"""The oracle: gradient accumulation in slow, obvious NumPy and float64. Shares no code with the package."""
import numpy as np


def network(parameters, x):
    """Logits of Dense(tanh) -> Dense; weights are (out, in) as MindSpore's."""
    w1, b1, w2, b2 = parameters
    hidden = np.tanh(x @ w1.T + b1)
    return hidden, hidden @ w2.T + b2


def loss_and_gradients(parameters, x, y):
    """Mean cross entropy over the rows of x, and its gradient for each parameter."""
    w2 = parameters[2]
    hidden, logits = network(parameters, x)
    shifted = logits - logits.max(axis=1, keepdims=True)
    probability = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    rows = np.arange(len(x))
    loss = -np.log(probability[rows, y]).mean()

    d_logits = probability.copy()
    d_logits[rows, y] -= 1
    d_logits /= len(x)
    d_w2 = d_logits.T @ hidden
    d_b2 = d_logits.sum(axis=0)
    d_hidden = (d_logits @ w2) * (1 - hidden ** 2)
    d_w1 = d_hidden.T @ x
    d_b1 = d_hidden.sum(axis=0)
    return loss, [d_w1, d_b1, d_w2, d_b2]


class SGD:
    def __init__(self, lr, momentum=0.0, weight_decay=0.0):
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.calls = 0

    def __call__(self, parameters, gradients):
        lr = self.lr(self.calls) if callable(self.lr) else self.lr
        velocity = self.velocity if self.calls else [0.0 for _ in parameters]
        gradients = [g + self.weight_decay * p for g, p in zip(gradients, parameters)]
        self.velocity = [self.momentum * v + g for v, g in zip(velocity, gradients)]
        self.calls += 1
        return [p - lr * v for p, v in zip(parameters, self.velocity)]


class Adam:
    def __init__(self, lr, beta1=0.9, beta2=0.999, eps=1e-8):
        self.lr, self.beta1, self.beta2, self.eps = lr, beta1, beta2, eps
        self.calls = 0

    def __call__(self, parameters, gradients):
        m, v = (self.m, self.v) if self.calls else ([0.0 for _ in parameters],) * 2
        self.calls += 1
        self.m = [self.beta1 * m + (1 - self.beta1) * g for m, g in zip(m, gradients)]
        self.v = [self.beta2 * v + (1 - self.beta2) * g ** 2 for v, g in zip(v, gradients)]
        rate = self.lr * np.sqrt(1 - self.beta2 ** self.calls) / (1 - self.beta1 ** self.calls)
        return [p - rate * m / (np.sqrt(v) + self.eps) for p, m, v in zip(parameters, self.m, self.v)]


def window_length(accumulate_step, update_step):
    if isinstance(accumulate_step, dict):
        return accumulate_step[max(start for start in accumulate_step if start <= update_step)]
    if callable(accumulate_step):
        return int(accumulate_step(update_step))
    return accumulate_step


class Accumulation:
    """Keeps every weighted gradient of the open window in a list and looks at them when the window closes."""

    def __init__(self, parameters, optimizer, accumulate_step, reduction="sum", clip_norm=None, on_nonfinite="apply"):
        self.parameters = [np.array(p, np.float64) for p in parameters]
        self.optimizer, self.accumulate_step = optimizer, accumulate_step
        self.reduction, self.clip_norm, self.on_nonfinite = reduction, clip_norm, on_nonfinite
        self.window = []
        self.update_step = self.skipped = 0
        self.grad_norm = np.nan

    @property
    def mini_step(self):
        return len(self.window)

    def __call__(self, gradients, weight=1.0):
        self.add(gradients, weight)
        return self.close_if(self.full)

    @property
    def full(self):
        if hasattr(self.accumulate_step, "budget"):
            budget, at_most = self.accumulate_step.budget, self.accumulate_step.at_most
            return len(self.window) >= at_most or sum(weight for weight, _ in self.window) >= budget
        return len(self.window) >= window_length(self.accumulate_step, self.update_step)

    def add(self, gradients, weight=1.0):
        finite = weight == 0 or all(np.isfinite(g).all() for g in gradients)
        if self.on_nonfinite == "skip_microbatch" and not finite:
            self.skipped += 1
        else:
            self.window.append((weight, [np.array(g, np.float64) for g in gradients]))

    def close_if(self, condition):
        closed = bool(condition and self.window)
        if condition:
            self.apply()
        return closed

    def flush(self):
        return self.close_if(len(self.window) > 0)

    def reset(self):
        self.window = []

    def apply(self):
        counted = [(w, g) for w, g in self.window if w != 0]
        total = [sum((w * g[i] for w, g in counted), np.zeros_like(p)) for i, p in enumerate(self.parameters)]
        if self.reduction == "mean":
            total = [g / (sum(w for w, _ in counted) or 1.0) for g in total]
        self.reset()
        if self.on_nonfinite == "skip_window" and not all(np.isfinite(g).all() for g in total):
            self.skipped += 1
            return
        if self.clip_norm is not None:
            self.grad_norm = np.sqrt(sum((g ** 2).sum() for g in total))
            total = [g * np.minimum(1.0, self.clip_norm / (self.grad_norm + 1e-6)) for g in total]
        self.parameters = self.optimizer(self.parameters, total)
        self.update_step += 1


class LocalUpdates:
    """Ranks that train by themselves, each an `Accumulation` with windows of one, and their outer steps (DiLoCo)."""

    def __init__(self, ranks, every, rate, momentum):
        self.ranks, self.every, self.rate, self.momentum = ranks, every, rate, momentum
        self.parameters = [p.copy() for p in ranks[0].parameters]
        self.velocity = [np.zeros_like(p) for p in self.parameters]

    def epoch(self, batches):
        """`batches`: of each rank, which takes part in a round until it has made `every` updates or is at its end."""
        left = [list(batches_of_rank) for batches_of_rank in batches]
        while any(left):
            moved = []
            for rank, mine in zip(self.ranks, left):
                before = rank.update_step
                while mine and rank.update_step < before + self.every:
                    rank(loss_and_gradients(rank.parameters, *mine.pop(0))[1])
                if rank.update_step > before:
                    moved.append(rank)
            if moved:
                self.parameters = self.step(moved)
            for rank in self.ranks:
                rank.parameters = [p.copy() for p in self.parameters]

    def step(self, moved):
        differences = [np.mean([p - q for q in each], axis=0)
                       for p, *each in zip(self.parameters, *[rank.parameters for rank in moved])]
        self.velocity = [self.momentum * v + d for v, d in zip(self.velocity, differences)]
        return [p - self.rate * (d + self.momentum * v)
                for p, d, v in zip(self.parameters, differences, self.velocity)]


def noise_and_signal(windows, decay=1.0):
    """S and |G|² of the gradient noise scale from windows of (gradient, weight), straight from the definitions: the
    weighted variance of the gradients about their mean, and what of that mean's squared norm is not noise."""
    totals = np.zeros(3)
    for window in windows:
        others = len(window) - 1
        if others > 0:
            weights = np.array([weight for _, weight in window])
            mean = sum(weight * gradient for gradient, weight in window) / weights.sum()
            noise = sum(weight * ((gradient - mean) ** 2).sum() for gradient, weight in window) / others
            totals = totals * decay + others * np.array([noise, (mean**2).sum() - noise / weights.sum(), 1])
    return totals[:2] / totals[2]


class AdaptiveLength:
    """Lengths of windows that follow the noise scale; `close` takes one window of all ranks, as `noise_and_signal`."""

    def __init__(self, minimum, maximum, target):
        self.minimum, self.maximum, self.target = minimum, maximum, target
        self.length = self.chosen = minimum
        self.totals, self.sizes = np.zeros(3), np.zeros(2)
        self.measured = self.unmeasured = 0

    def close(self, window, microbatches):
        """`microbatches`: those of one rank."""
        self.sizes = 0.95 * self.sizes + [sum(weight for _, weight in window), microbatches]
        others = len(window) - 1
        self.measured, self.unmeasured = self.measured + (others > 0), 0 if others else self.unmeasured + 1
        if others:
            self.totals = 0.95 * self.totals + others * np.array([*noise_and_signal([window]), 1])
        if self.measured >= 8:
            noise, signal, _ = self.totals
            wanted = noise / (signal * self.target * self.sizes[0] / self.sizes[1]) if signal > 0 else np.inf
            before = self.chosen
            if wanted > 2**0.75 * self.chosen and 2 * self.chosen <= self.maximum:
                self.chosen *= 2
            elif wanted < 2**-0.75 * self.chosen and self.chosen > self.minimum:
                self.chosen //= 2
            if self.chosen != before:
                self.measured = 0
        self.length = self.chosen
        if self.chosen == 1 and self.unmeasured >= 7:
            self.length = min(2, self.maximum)

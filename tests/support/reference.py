"""The oracle: gradient accumulation in slow, obvious NumPy and float64. Shares no code with the package."""
import numpy as np

COUNTERS = ("update_step", "mini_step", "closed_windows", "skipped", "skipped_in_row", "empty_windows")


def network(parameters, x):
    """Logits of Dense(tanh) -> Dense; weights are (out, in) as MindSpore's."""
    w1, b1, w2, b2 = parameters
    hidden = np.tanh(x @ w1.T + b1)
    return hidden, hidden @ w2.T + b2


def loss_and_gradients(parameters, x, y):
    """Mean cross entropy over the rows of x, and its gradient for each parameter."""
    hidden, logits = network(parameters, x)
    shifted = logits - logits.max(axis=1, keepdims=True)
    probability = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    rows = np.arange(len(x))
    loss = -np.log(probability[rows, y]).mean()

    d_logits = probability.copy()
    d_logits[rows, y] -= 1
    d_logits /= len(x)
    d_hidden = (d_logits @ parameters[2]) * (1 - hidden ** 2)
    return loss, [d_hidden.T @ x, d_hidden.sum(axis=0), d_logits.T @ hidden, d_logits.sum(axis=0)]


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


def window_length(accumulate_step, update_step):
    if isinstance(accumulate_step, dict):
        return accumulate_step[max(start for start in accumulate_step if start <= update_step)]
    return accumulate_step


class Accumulation:
    """Keeps every piece of the open window in a list, with its weight, and looks at them when the window closes.

    A piece is its gradients, one array for each parameter. `divisor`: what "sum" is divided by; `min_weight`: the least
    divisor of "mean". `measures`: whether to keep what the noise scale is measured by. `grad_norm`: that of the last
    window; None if it was dropped.
    """

    divisor, measures, min_weight = 1.0, False, 0.0

    def __init__(self, parameters, optimizer, accumulate_step, reduction="sum", clip_norm=None, on_nonfinite="apply"):
        self.parameters = [np.array(p, np.float64) for p in parameters]
        self.optimizer, self.accumulate_step = optimizer, accumulate_step
        self.reduction, self.clip_norm, self.on_nonfinite = reduction, clip_norm, on_nonfinite
        self.zeros = [np.zeros_like(p) for p in self.parameters]  # a gradient
        self.update_step = self.skipped = self.skipped_in_row = self.closed_windows = self.empty_windows = 0
        self.grad_norm, self.window_weight, self.weight_of_updates, self.measured = None, 0.0, 0.0, []
        self.begin()

    @property
    def weight_sum(self):
        """The weights in the window: a skipped piece has none."""
        return float(sum(weight for weight, _ in self.window))

    def share(self, weight):
        """Of a mean of this weight: what is left of it where `min_weight` is more."""
        return weight / (max(weight, self.min_weight) or 1.0)

    @property
    def full(self):
        if not hasattr(self.accumulate_step, "budget"):
            return self.mini_step >= window_length(self.accumulate_step, self.update_step)
        return self.weight_sum >= self.accumulate_step.budget or self.mini_step >= self.accumulate_step.at_most

    def counters(self):
        """What a `Status` counts, by name."""
        return {name: getattr(self, name) for name in COUNTERS}

    def gradients_of(self, piece):
        return [np.asarray(g, np.float64) for g in piece]

    def is_finite(self, piece):
        return all(np.isfinite(g).all() for g in piece)

    def __call__(self, piece, weight=1.0):
        self.add_pieces([(piece, weight)])
        return self.close_if(self.full)

    def add_pieces(self, pieces):
        """One microbatch of (piece, weight), which counts once, whatever is skipped of it. Return what was taken."""
        taken = [(weight, piece) for piece, weight in pieces
                 if self.on_nonfinite != "skip_microbatch" or weight == 0 or self.is_finite(piece)]
        self.window += taken
        self.skips += len(pieces) - len(taken)
        self.mini_step += 1
        return [piece for _, piece in taken]

    def close_if(self, condition):
        closed = bool(condition and self.mini_step)
        if closed:
            self.apply()
        return closed

    def flush(self):
        return self.close_if(True)

    def begin(self):
        self.window, self.mini_step, self.skips = [], 0, 0

    def reset(self):
        self.begin()
        self.skipped_in_row = 0

    def gradient(self):
        """Of the window."""
        counted = [(weight, self.gradients_of(piece)) for weight, piece in self.window if weight != 0]
        divisor = (max(self.weight_sum, self.min_weight) or 1.0) if self.reduction == "mean" else self.divisor
        return [sum((weight * g[i] for weight, g in counted), zero) / divisor for i, zero in enumerate(self.zeros)]

    def apply(self):
        """Update with the window, or drop it: then at least one skip is counted."""
        gradient = self.gradient()
        self.window_weight = self.weight_sum
        self.closed_windows += 1
        self.empty_windows += self.weight_sum == 0
        counts = self.has_taken() if self.min_weight else self.weight_sum != 0
        applied = self.on_nonfinite == "apply" or (counts and self.accepts(gradient))
        self.skipped += max(self.skips, 1 - applied)
        self.skipped_in_row = 0 if applied else self.skipped_in_row + 1
        self.grad_norm = None
        if applied:
            self.update(gradient)
        self.begin()

    def has_taken(self):
        return bool(self.window)

    def accepts(self, gradient):
        return self.on_nonfinite != "skip_window" or self.is_finite(gradient)

    def update(self, gradient):
        if self.measures:
            self.measured.append([(np.concatenate([g.reshape(-1) for g in self.gradients_of(piece)]), weight)
                                  for weight, piece in self.window if weight != 0])
        self.grad_norm = np.nan
        if self.clip_norm is not None:
            self.grad_norm = np.sqrt(sum((g ** 2).sum() for g in gradient))
            gradient = [g * np.minimum(1.0, self.clip_norm / (self.grad_norm + 1e-6)) for g in gradient]
        self.move(gradient)
        self.update_step += 1
        self.weight_of_updates += self.weight_sum

    def move(self, gradient):
        self.parameters = self.optimizer(self.parameters, gradient)


class Undivided(Accumulation):
    """Differentiates all pieces of a window at once: a piece is a batch of arrays."""

    def is_finite(self, piece):
        return np.isfinite(piece[0]).all()

    def accepts(self, gradient):
        return self.on_nonfinite != "skip_window" or super().is_finite(gradient)

    def gradients_of(self, piece):
        return loss_and_gradients(self.parameters, *piece)[1]

    def gradient(self):
        present = [piece for weight, piece in self.window if weight]
        if not present:
            return self.zeros
        factor = self.weight_sum / self.divisor if self.reduction == "sum" else self.share(self.weight_sum)
        return [g * factor for g in self.gradients_of(tuple(map(np.concatenate, zip(*present))))]


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

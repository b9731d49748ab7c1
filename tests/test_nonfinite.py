"""What is left out because it is not finite leaves no trace."""
import mindspore as ms
import numpy as np
import pytest
from conftest import compiled
from mindspore import Parameter, Tensor, nn, ops

from ms_accum import Accumulator

pytestmark = pytest.mark.core

SHAPES = ((2, 3), (), (4,))
KINDS = [(parameter, value) for parameter in range(3) for value in (np.nan, np.inf, -np.inf)]


@pytest.mark.parametrize("policy", ["skip_microbatch", "skip_window"])
def test_skipped_microbatches_and_dropped_windows_leave_no_trace(mode, policy):
    """Of every kind, in every parameter: all state is bit-identical to that of a run which never saw one."""
    weights = [Parameter(Tensor(np.full(shape, 0.5), ms.float32), name=f"trace.{i}") for i, shape in enumerate(SHAPES)]
    optimizer = nn.Momentum(weights, nn.exponential_decay_lr(0.5, 0.9, 100, 1, 1), 0.9, weight_decay=0.01)
    acc = Accumulator(optimizer, 3, 0.5, reduction="mean", on_nonfinite=policy)
    state = [p for p in (*optimizer.get_parameters(), *acc.parameters)
             if not p.name.endswith(("skipped", "skipped_in_row", "closed_windows"))]
    start, rng = [Tensor(p.asnumpy().copy()) for p in state], np.random.default_rng(0)

    def step(*gradients):
        return acc(gradients, 2.0)

    step = compiled(step, mode)

    def run(sequence):
        for parameter, value in zip(state, start):
            ops.assign(parameter, value)
        for gradients in sequence:
            step(*[Tensor(g, ms.float32) for g in gradients])
        return [p.asnumpy().tobytes() for p in state]

    *good, last = [[rng.normal(size=shape) for shape in SHAPES] for _ in range(28)]
    clean, bad = run([*good, last]), []
    for i, (parameter, value) in enumerate(KINDS):
        window, place = good[3 * i:3 * i + 3], i % 3
        broken = [np.array(g) for g in window[place]]
        broken[parameter].reshape(-1)[-1:] = value  # one bad element
        if policy == "skip_microbatch":
            bad += [*window[:place], broken, *window[place:]]
        else:
            bad += [*window[:place], broken, *window[place + 1:], *window]
    assert run([*bad, last]) == clean
    assert int(acc.skipped) == len(KINDS)
    assert run([*good[:-1], last, last]) != clean  # the negative control

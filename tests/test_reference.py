"""The oracle itself; test_accumulator.py holds it against the contract, written by hand."""
import numpy as np
import pytest
import reference
from conftest import MLP, batches, difference, values


def test_its_gradients_are_those_of_finite_differences():
    parameters, (x, y) = values(MLP().trainable_params()), batches([5])[0]
    _, gradients = reference.loss_and_gradients(parameters, x, y)
    for parameter, gradient in zip(parameters, gradients):
        for position in np.ndindex(parameter.shape):
            original = parameter[position]
            losses = []
            for step in (1e-6, -1e-6):
                parameter[position] = original + step
                losses.append(reference.loss_and_gradients(parameters, x, y)[0])
            parameter[position] = original
            assert gradient[position] == pytest.approx((losses[0] - losses[1]) / 2e-6, abs=1e-8)


@pytest.mark.parametrize("optimizer", [reference.SGD, reference.Adam])
def test_ragged_microbatches_update_as_their_undivided_batch(optimizer):
    start, data = values(MLP().trainable_params()), batches([4, 2, 3] * 4)
    pieces, whole = (reference.Accumulation(start, optimizer(0.01), n, "mean") for n in (3, 1))
    for i in range(0, len(data), 3):
        for x, y in data[i:i + 3]:
            pieces(reference.loss_and_gradients(pieces.parameters, x, y)[1], len(x))
        x, y = (np.concatenate(part) for part in zip(*data[i:i + 3]))
        whole(reference.loss_and_gradients(whole.parameters, x, y)[1], len(x))
    assert difference(pieces.parameters, whole.parameters) <= 1e-9
    assert difference(start, whole.parameters) > 1e-3

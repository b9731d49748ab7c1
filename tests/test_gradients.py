"""The pure functions on gradients, against NumPy, in graph mode and PyNative."""
import mindspore as ms
import numpy as np
import pytest
from conftest import compiled
from mindspore import Tensor

from ms_accum import gradients


@pytest.mark.parametrize("dtype", [ms.float16, ms.float32, ms.float64])
def test_global_norm(mode, dtype):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape) for shape in [(), (1,), (7, 3), (200, 300)]]
    tensors = tuple(Tensor(a, dtype) for a in arrays)
    norm = compiled(gradients.global_norm, mode)(tensors)
    expected = np.sqrt(sum((t.asnumpy().astype(np.float64) ** 2).sum() for t in tensors))
    assert norm.dtype == ms.float32
    assert float(norm) == pytest.approx(expected, rel=1e-6)


def test_global_norm_of_float16_does_not_overflow(mode):
    norm = compiled(gradients.global_norm, mode)((Tensor(np.full(100, 6e4), ms.float16),))
    assert float(norm) == pytest.approx(6e5, rel=1e-3)


@pytest.mark.parametrize(("norm", "clip_norm", "expected"), [
    (2.0, 1.0, 0.5), (0.5, 1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0, 1.0), (1e-6, 1e-6, 0.5),
    (5.0, float("inf"), 1.0), (float("inf"), float("inf"), 1.0), (float("inf"), 1.0, 0.0)])
def test_clip_factor(mode, norm, clip_norm, expected):
    def factor(norm):
        return gradients.clip_factor(norm, clip_norm) * Tensor(1.0, ms.float32)

    assert float(compiled(factor, mode)(Tensor(norm, ms.float32))) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("dtype", [ms.float16, ms.float32])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -float("inf")])
def test_all_finite(mode, dtype, bad):
    last = np.ones((3, 2))
    if bad is not None:
        last[2, 1] = bad
    finite = compiled(gradients.all_finite, mode)((Tensor(np.ones(4), dtype), Tensor(last, dtype)))
    assert bool(finite) is (bad is None)


@pytest.mark.parametrize(("given", "factor", "asked", "expected"), [
    (ms.float16, 1.0, ms.float32, 3.0), (ms.float32, 0.5, ms.float16, 1.5), (ms.float32, 2, ms.float32, 6.0),
    (ms.float16, 30000.0, ms.float32, 90000.0)])
def test_scaled(mode, given, factor, asked, expected):
    def scale(gradient):
        return gradients.scaled(gradient, factor, asked)

    result = compiled(scale, mode)(Tensor([3.0], given))
    assert result.dtype == asked
    assert float(result.asnumpy()[0]) == expected

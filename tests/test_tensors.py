"""The pure functions on gradients against NumPy. Compiled, they are in each graph of test_differential.py."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from support.modes import compiled

from ms_accum import tensors

pytestmark = pytest.mark.core

INF, NAN = float("inf"), float("nan")
HALF, SINGLE, DOUBLE = ms.float16, ms.float32, ms.float64


def full(value, shape=(1,), dtype=SINGLE):
    return Tensor(np.full(shape, value), dtype)


def test_the_norm_is_numpys():
    """That of float16 gradients does not overflow, that of tiny ones does not vanish."""
    rng = np.random.default_rng(0)
    for dtype in (HALF, SINGLE, DOUBLE):
        drawn = [Tensor(rng.normal(size=shape), dtype) for shape in ((), (1,), (7, 3), (200, 300))]
        expected = np.sqrt(sum((t.asnumpy().astype(np.float64) ** 2).sum() for t in drawn))
        norm = tensors.global_norm(drawn)
        assert (norm.dtype, float(norm)) == (SINGLE, pytest.approx(expected, rel=1e-6))
    assert float(tensors.global_norm((full(6e4, 100, HALF),))) == pytest.approx(6e5, rel=1e-3)
    assert float(tensors.global_norm((full(1e-25, 100),))) == pytest.approx(1e-24, rel=1e-5, abs=0)
    assert float(tensors.global_norm((full(1e11, 100),))) == pytest.approx(1e12, rel=1e-5)
    assert float(tensors.global_norm((full(8e12),))) == pytest.approx(8e12, rel=1e-5)
    for factor in (-1e-9, Tensor(1e-9)):  # what is measured is the product, also of a sum that is out of range itself
        assert float(tensors.global_norm((full(1e18, 100),), factor)) == pytest.approx(1e10, rel=1e-5)
    for norm, clip_norm, factor in ((2, 1, 0.5), (0.5, 1, 1), (0, 1, 1), (1e-6, 1e-6, 0.5), (INF, INF, 1), (INF, 1, 0)):
        assert float(tensors.clip_factor(full(norm), clip_norm)) == pytest.approx(factor, rel=2e-6)


def test_the_clip_factor_of_nan_is_nan(mode):
    """Or what is finite beside the NaN would be applied unclipped: MindSpore's `minimum(NaN, 1)` is 1 on CPU."""
    def factor_of(norm):
        return tensors.clip_factor(norm, 1.0)

    factor = compiled(factor_of, mode)
    assert np.isnan(factor(full(NAN)).asnumpy())


@pytest.mark.parametrize(("value", "factor", "asked", "expected"), [
    (full(3, dtype=HALF), 1.0, SINGLE, 3.0),
    (full(3), 0.5, HALF, 1.5),
    (full(3, dtype=HALF), 30000.0, SINGLE, 90000.0),
    (full(NAN), 0.0, SINGLE, 0.0),
    (full(INF), Tensor(0.0), SINGLE, 0.0),
    (full(3), Tensor(2.0), SINGLE, 6.0),
    (full(NAN), Tensor(1.0), SINGLE, NAN),
])
def test_products_are_those_of_the_wider_dtype_and_0_times_nan_is_0(value, factor, asked, expected):
    product = tensors.scaled(factor, value, asked)
    assert (product.dtype, float(product)) == (asked, pytest.approx(expected, nan_ok=True))
    assert tensors.wider(HALF, SINGLE) == tensors.wider(SINGLE, HALF) == SINGLE


@pytest.mark.parametrize("bad", [None, NAN, INF, -INF])
def test_one_bad_element_is_found(bad):
    last, ones = np.ones((3, 2)), full(1, 4)
    last[2, 1] = last[2, 1] if bad is None else bad
    for given in ((ones, Tensor(last, SINGLE)), (Tensor(last, SINGLE), ones), (ones, Tensor(last, HALF))):
        assert bool(ops.isfinite(tensors.finite_sum(given))) == (bad is None)
    assert not ops.isfinite(tensors.finite_sum((full(1e38, 9),))), "its sum overflows: no update would survive it"
    assert tensors.as_vector((1, full(2), Tensor([3]))).asnumpy().tolist() == [1, 2, 3]

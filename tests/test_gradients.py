"""The pure functions on gradients against NumPy; compiled, all in one graph."""
import mindspore as ms
import numpy as np
import pytest
from conftest import compiled
from mindspore import Tensor

from ms_accum import gradients

pytestmark = pytest.mark.core

DTYPES = (ms.float16, ms.float32, ms.float64)
SHAPES = [(), (1,), (7, 3), (200, 300)]
INF, NAN = float("inf"), float("nan")
FACTORS = [  # norm, clip_norm, factor
    (2.0, 1.0, 0.5), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0), (1e-6, 1e-6, 0.5), (5.0, INF, 1.0), (INF, INF, 1.0), (INF, 1.0, 0.0)]
SCALED = [  # 3 in this dtype, times this factor, in that dtype
    (ms.float16, 1.0, ms.float32, 3.0), (ms.float32, 0.5, ms.float16, 1.5), (ms.float16, 30000.0, ms.float32, 90000.0)]
WEIGHTED = [(NAN, 0.0, 0.0), (INF, Tensor(0.0), 0.0), (3.0, Tensor(2.0), 6.0), (NAN, Tensor(1.0), NAN)]


def everything(*inputs):
    norms, factors, products = (), (), ()
    for i in range(3):
        norms = (*norms, gradients.global_norm(inputs[4 * i:4 * i + 4]))
    large, tiny, single, ones, numbers = inputs[12:]
    norms = (*norms, gradients.global_norm((large,)), gradients.global_norm((tiny,)))
    for i in range(len(FACTORS)):
        factors = (*factors, gradients.clip_factor(numbers[i], FACTORS[i][1]) * Tensor(1.0, ms.float32))
    for given, factor, asked, _ in SCALED:
        products = (*products, gradients.scaled(factor, Tensor([3.0], given), asked))
    for value, factor, _ in WEIGHTED:
        products = (*products, gradients.weighted(factor, Tensor([value], ms.float32), ms.float32))
    finite = [gradients.all_finite(given) for given in ((ones, single), (single, ones), (ones, single.astype(ms.float16)))]
    return norms, factors, products, gradients.as_vector((1, numbers[0], Tensor([2]))), *finite


def test_the_functions_are_numpys(mode):
    """The norm of float16 gradients does not overflow, that of tiny ones does not vanish, and 0 * NaN is 0."""
    rng = np.random.default_rng(0)
    arrays = [Tensor(rng.normal(size=shape), dtype) for dtype in DTYPES for shape in SHAPES]
    expected = [np.sqrt(sum((t.asnumpy().astype(np.float64) ** 2).sum() for t in arrays[i:i + 4])) for i in (0, 4, 8)]
    large, tiny = Tensor(np.full(100, 6e4), ms.float16), Tensor(np.full(100, 1e-25), ms.float32)
    numbers, function = Tensor([norm for norm, _, _ in FACTORS], ms.float32), compiled(everything, mode)
    for bad in (None, NAN, INF, -INF):
        last = np.ones((3, 2))
        last[2, 1] = last[2, 1] if bad is None else bad
        inputs = *arrays, large, tiny, Tensor(last, ms.float32), Tensor(np.ones(4), ms.float32), numbers
        norms, factors, products, vector, *finite = function(*inputs)
        assert list(map(bool, finite)) == [bad is None] * 3
    assert {norm.dtype for norm in norms} == {ms.float32}
    assert list(map(float, norms)) == [*(pytest.approx(e, rel=1e-6) for e in expected), pytest.approx(6e5, rel=1e-3),
                                       pytest.approx(1e-24, rel=1e-5)]
    assert list(map(float, factors)) == pytest.approx([factor for _, _, factor in FACTORS], rel=2e-6)
    assert [p.dtype for p in products] == [*(asked for _, _, asked, _ in SCALED), *[ms.float32] * len(WEIGHTED)]
    results = [*(value for *_, value in SCALED), *(value for *_, value in WEIGHTED)]
    assert [float(p.asnumpy().item()) for p in products] == pytest.approx(results, nan_ok=True)
    assert vector.asnumpy().tolist() == [1, 2, 2]
    assert {gradients.wider(one, other) for one, other in ((ms.float16, ms.float32), (ms.float32, ms.float16))} == {ms.float32}
    assert not gradients.all_finite((Tensor(np.full(9, 1e38), ms.float32),)), "its sum overflows: no update would survive it"

"""The dtype of the buffers, and how long a sum in 16 bits may become."""
from __future__ import annotations

from typing import Optional
from warnings import warn

import mindspore as ms

from ..tensors import FLOATS, HALF

# A sum of n equal gradients is at least 2**p / 2 units in its last place, of p significant bits, if n is, in units of a
# gradient. So an addition is rounded by up to n / 2**p gradients, and has no effect from n = 2**p on (float16: 2,048,
# bfloat16: 256). These are a quarter of that: there, sums of equal gradients are off by 3 % of their norm, and those of
# gradients of one sign, drawn from 0.5 to 1.5 times their mean, by 0.8 % at most.
LONGEST_SUM = {ms.float16: 512, ms.bfloat16: 64}
_LOST = ("buffer_dtype is {0} and windows may hold {1} gradients, expected at most {2} in 16 bits: the sum becomes so "
         "large that later gradients are rounded up or away, without an overflow, and updates are wrong; leave out "
         "buffer_dtype, which makes float32 buffers, or give shorter windows (with until_weight, at_most={2})")


def warn_of_lost_gradients(buffer_dtype: Optional[ms.Type], longest: int, pieces: int = 1) -> None:
    """Warn if windows of up to `longest` microbatches, each in `pieces` pieces, are too long for 16-bit buffers."""
    limit = LONGEST_SUM.get(buffer_dtype)
    if limit is not None and longest * pieces > limit:
        warn(_LOST.format(buffer_dtype, f"{longest} x {pieces}" if pieces > 1 else longest, limit), stacklevel=2)


def buffer_dtype_of(buffer_dtype: Optional[ms.Type], parameter_dtype: ms.Type) -> ms.Type:
    """Return the dtype of a parameter's buffer: `buffer_dtype`, or the parameter's dtype, but float32 for 16 bits."""
    if buffer_dtype is None:
        return ms.float32 if parameter_dtype in HALF else parameter_dtype
    if buffer_dtype not in FLOATS:
        raise ValueError(f"buffer_dtype is {buffer_dtype}, expected a float dtype such as ms.float32, or None")
    if buffer_dtype == ms.bfloat16 and ms.get_context("device_target") == "CPU":
        raise ValueError("buffer_dtype is BFloat16, expected ms.float32 or None on CPU: MindSpore's CPU backend cannot "
                         "add in BFloat16 (2.10); leave buffer_dtype out")
    return buffer_dtype

"""Checks that values are finite, because a NaN in the cache makes every weighted sum over it NaN, even if it is masked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

BF16_EXPONENT = np.uint16(0x7F80)


def is_finite(rows: NDArray[Any]) -> bool:
    """Return whether all values of ``rows [...]`` are finite.

    A uint16 array holds bf16 bit patterns; arrays of other integer types are always finite.
    """
    if rows.dtype == np.uint16:
        return bool(((rows & BF16_EXPONENT) != BF16_EXPONENT).all())
    if rows.dtype.kind != "f":
        return True
    if rows.dtype == np.float32 and math.isfinite(np.vdot(rows, rows)):
        return True  # one pass; the product of finite values may be infinite too
    return bool(np.isfinite(rows).all())

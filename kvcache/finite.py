"""Numbers that are finite: others must never be kept, since a hidden NaN poisons every sum that it is hidden in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BF16_EXPONENT = np.uint16(0x7F80)


def is_finite(rows: NDArray[Any]) -> bool:
    """Whether all numbers of ``rows`` (any shape) are finite. f32 and f16 as they are, bf16 as the uint16 that hold it; integers
    of other types are always finite."""
    if rows.dtype == np.uint16:
        return bool(((rows & BF16_EXPONENT) != BF16_EXPONENT).all())
    return rows.dtype.kind != "f" or bool(np.isfinite(rows).all())

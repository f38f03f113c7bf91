"""Checks that values are finite, because a NaN in the cache makes every weighted sum over it NaN, even if it is masked."""

from __future__ import annotations

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
    return rows.dtype.kind != "f" or bool(np.isfinite(rows).all())

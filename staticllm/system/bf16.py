"""bfloat16, which numpy does not have: its bits are held as uint16, the upper half of an f32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def from_bf16(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Return the numbers whose bits are given."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of finite numbers, rounded to the nearest, and to even if two are equally near."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded

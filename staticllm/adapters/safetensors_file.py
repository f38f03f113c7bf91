"""Reads tensors of floating-point numbers from a safetensors file, which may come from an untrusted source.

The ``safetensors`` package checks it: every tensor has exactly the bytes of its shape, none overlap, and headers are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from staticllm.errors import AdapterError
from staticllm.system.files import read_regular

MAX_BYTES = 4 << 30
"""Bytes of one file. The largest adapters have less than 2 GB."""
_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True)
class Tensor:
    """A tensor as it is stored: its type (``F32``, ``F16``, ``BF16``, or one that cannot be read), shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray

    def to_f32(self) -> NDArray[np.float32]:
        """Return the values as f32. Raises ValueError: they are of another type than ``F32``, ``F16`` and ``BF16``."""
        if self.dtype not in _TYPES:
            raise ValueError(f"the type {self.dtype}: only {', '.join(_TYPES)} can be read")
        values = np.frombuffer(self.data, _TYPES[self.dtype])
        if self.dtype == "BF16":  # the upper half of an f32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32).reshape(self.shape)


@dataclass(frozen=True)
class SafetensorsFile:
    """The tensors of a file, by name. ``name`` names the file in errors."""

    name: str
    tensors: Mapping[str, Tensor]


def read_safetensors(path: Path) -> SafetensorsFile:
    """Read a file. Raises AdapterError: it is missing, is no ordinary file, is too large, or is not a safetensors file."""
    try:
        data = read_regular(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AdapterError(f"the adapter {str(path)!r} cannot be read: {reason}") from None
    return parse_safetensors(data, str(path))


def parse_safetensors(data: bytes, name: str = "in memory") -> SafetensorsFile:
    """Return the tensors in the bytes of a safetensors file; ``name`` names it in errors.

    Raises:
        AdapterError: they are not those of a safetensors file.
    """
    try:
        found = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        reason = str(error).splitlines()[0][:200]
        raise AdapterError(f"the adapter {name!r} is damaged, or no safetensors file: {reason}") from None
    tensors = {key: Tensor(value["dtype"], tuple(value["shape"]), value["data"]) for key, value in found}
    return SafetensorsFile(name, tensors)

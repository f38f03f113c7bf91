"""Reads tensors of floating-point numbers from a safetensors file, which may come from an untrusted source.

The ``safetensors`` package checks that every tensor has exactly the bytes of its shape, and that none overlap. What errors would
repeat is bounded here: the header, the number of tensors, their names and their axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from staticllm.errors import AdapterError, quoted
from staticllm.system.bf16 import from_bf16
from staticllm.system.files import read_regular

MAX_BYTES = 2 << 30
"""Bytes of one file. Reading takes twice as much memory for a moment."""
MAX_HEADER = 16 << 20
"""Bytes of a header."""
MAX_TENSORS = 1 << 16
MAX_NAME = 1024
MAX_AXES = 8
_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True)
class Tensor:
    """A tensor as it is stored: its type (``F32``, ``F16``, ``BF16``, or one that cannot be read), shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray

    def to_f32(self) -> NDArray[np.float32]:
        """Return the values as f32.

        Raises:
            ValueError: they are of another type than ``F32``, ``F16`` and ``BF16``.
        """
        if self.dtype not in _TYPES:
            raise ValueError(f"the type {self.dtype}: only {', '.join(_TYPES)} can be read")
        values = np.frombuffer(self.data, _TYPES[self.dtype])
        return (from_bf16(values) if self.dtype == "BF16" else values.astype(np.float32)).reshape(self.shape)


@dataclass(frozen=True)
class SafetensorsFile:
    """The tensors of a file, by name."""

    name: str
    """Names the file in errors."""
    tensors: dict[str, Tensor]

    def take(self, name: str) -> Tensor:
        """Return a tensor, and forget it, so that its memory is freed with it."""
        return self.tensors.pop(name)


def read_safetensors(path: Path) -> SafetensorsFile:
    """Read a file.

    Raises:
        AdapterError: it is missing, is no ordinary file, is too large, or is not a safetensors file.
    """
    try:
        data = read_regular(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AdapterError(f"the adapter {quoted(path)} cannot be read: {reason}") from None
    return parse_adapter(data, str(path))


def parse_adapter(data: bytes, name: str = "in memory") -> SafetensorsFile:
    """Return the tensors in the bytes of an adapter's file; ``name`` names it in errors.

    Raises:
        AdapterError: they are not those of a safetensors file.
    """
    try:
        return SafetensorsFile(name, parse_safetensors(data))
    except ValueError as error:
        raise AdapterError(f"the adapter {quoted(name)} is damaged, or no safetensors file: {error}") from None


def parse_safetensors(data: bytes) -> dict[str, Tensor]:
    """Return the tensors in the bytes of a safetensors file, by name.

    Raises:
        ValueError: they are not those of a safetensors file, or of one with a header, names or axes beyond the limits.
    """
    if int.from_bytes(data[:8], "little") > MAX_HEADER:
        raise ValueError(f"its header has more than {MAX_HEADER} bytes")
    try:
        found = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ValueError(str(error).splitlines()[0][:200]) from None
    if len(found) > MAX_TENSORS:
        raise ValueError(f"it has {len(found)} tensors, at most {MAX_TENSORS} are read")
    for name, value in found:
        if len(name) > MAX_NAME or len(value["shape"]) > MAX_AXES:
            raise ValueError(
                f"the tensor {name[:60]!r} has a name of {len(name)} characters and {len(value['shape'])} axes, "
                f"at most {MAX_NAME} and {MAX_AXES} are read"
            )
    return {name: Tensor(value["dtype"], tuple(value["shape"]), value["data"]) for name, value in found}

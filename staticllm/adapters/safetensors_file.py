"""Reads tensors of floating-point numbers from a safetensors file, which may come from an untrusted source.

The format is a length (8 bytes, little-endian), a JSON header of that length, and the data. The header gives each tensor's type,
shape and range in the data. Every field is checked before anything is read: sizes are bounded, and a tensor's range has
exactly the bytes of its shape. The ``safetensors`` package cannot read bf16 into numpy, and names no file in its errors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import AdapterError
from staticllm.system.files import open_regular

MAX_HEADER = 16 << 20
MAX_TENSORS = 1 << 16
MAX_BYTES = 4 << 30
"""Bytes of one file. The largest adapters have less than 2 GB."""
MAX_AXES = 8
MAX_NAME = 1024
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: its type (``F32``, ``F16``, ``BF16``), its shape, and its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class SafetensorsFile:
    """An open file whose header was checked. ``entries``: name → tensor; ``name`` names the file in errors."""

    def __init__(self, file: BinaryIO, num_bytes: int, name: str) -> None:
        self._file, self.name = file, name
        self.entries = _entries(
            self._read(8, num_bytes), lambda count: self._read(count, num_bytes - 8), num_bytes, name
        )

    def read(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as f32.

        Raises:
            AdapterError: the file is shorter than its header says.
        """
        entry = self.entries[name]
        self._file.seek(entry.start)
        data = self._read(entry.num_bytes, entry.num_bytes)
        if entry.dtype == "BF16":  # the upper half of an f32
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data, "<f4" if entry.dtype == "F32" else "<f2").astype(np.float32)
        found: NDArray[np.float32] = values.reshape(entry.shape)
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, count: int, most: int) -> bytes:
        data = self._file.read(count) if 0 <= count <= most else b""
        if len(data) != count:
            raise _damaged(self.name, "it is shorter than its header says")
        return data

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_safetensors(path: Path) -> SafetensorsFile:
    """Open a file and check its header.

    Raises:
        AdapterError: the file is missing, is no ordinary file, is too large, or is not a safetensors file.
    """
    try:
        file = open_regular(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AdapterError(f"the adapter {str(path)!r} cannot be read: {reason}") from None
    try:
        return SafetensorsFile(file, _size_of(file, str(path)), str(path))
    except BaseException:
        file.close()
        raise


def safetensors_in_memory(data: bytes) -> SafetensorsFile:
    """Return the bytes of a safetensors file as an open file.

    Raises:
        AdapterError: they are not those of a safetensors file.
    """
    return SafetensorsFile(BytesIO(data), len(data), "in memory")


def _size_of(file: BinaryIO, name: str) -> int:
    size = file.seek(0, 2)
    file.seek(0)
    if size > MAX_BYTES:
        raise AdapterError(f"the adapter {name!r} has {size} bytes, at most {MAX_BYTES} are read: is it a whole model?")
    return size


def _entries(start: bytes, read: Callable[[int], bytes], num_bytes: int, name: str) -> dict[str, TensorEntry]:
    """Return the tensors that the header describes, after checking each of them."""
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER:
        raise _damaged(name, f"its header has {length} bytes, at most {MAX_HEADER} are read")
    try:
        header = json.loads(read(length))
        if not isinstance(header, dict) or len(header) > MAX_TENSORS:
            raise ValueError(f"its header is no object of at most {MAX_TENSORS} tensors")
        left = num_bytes - 8 - length
        entries = {key: _entry(key, value, 8 + length, left) for key, value in header.items() if key != "__metadata__"}
        if (total := sum(entry.num_bytes for entry in entries.values())) > left:
            raise ValueError(f"its tensors overlap: they have {total} bytes, the file has {left}")
        return entries
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = (
            "its header is no JSON" if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) else str(error)
        )
        raise _damaged(name, (reason.splitlines() or ["its header is malformed"])[0][:200]) from None


def _entry(key: str, value: Any, base: int, left: int) -> TensorEntry:
    """Return the entry of one tensor; ``left`` is the number of bytes after the header, which begin at ``base``.

    Raises:
        ValueError, TypeError, KeyError: a field is missing, of another type, or impossible.
    """
    what = f"the tensor {key[:80]!r}"
    if not isinstance(value, Mapping) or set(value) != {"dtype", "shape", "data_offsets"} or len(key) > MAX_NAME:
        raise ValueError(f"{what} has not the fields dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{what} has the type {str(dtype)[:20]}: only {', '.join(ITEM_BYTES)} can be read")
    if not isinstance(shape, list) or len(shape) > MAX_AXES or not all(_is_size(size) for size in shape):
        raise ValueError(f"{what} has an impossible shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise ValueError(f"{what} has an impossible place in the file")
    begin, end = offsets
    entry = TensorEntry(dtype, tuple(shape), base + begin)
    if not begin <= end <= left or end - begin != entry.num_bytes:
        raise ValueError(
            f"{what} has {entry.num_bytes} bytes by its shape, but its place is {begin} to {end} of {left}"
        )
    return entry


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_BYTES


def _damaged(name: str, reason: str) -> AdapterError:
    return AdapterError(f"the adapter {name!r} is damaged, or no safetensors file: {reason}")

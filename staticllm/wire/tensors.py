"""Tensors in messages: small ones inside the message, large ones in a block of shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .messages import MAX_INLINE, Message, ProtocolError

Array = NDArray[Any]
ELEMENT_TYPES = frozenset(["|b1", "|i1", "|u1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<i8", "<u8", "<f8"])
"""NumPy's names of the element types that a tensor in a message may have."""
MAX_TENSORS = 256
MAX_RANK = 16
ALIGNMENT = 64


def size_of(arrays: Sequence[Array]) -> int:
    """Return the bytes that ``write`` needs for these arrays."""
    return sum(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)


def describe(arrays: Sequence[Array], names: Sequence[int | str]) -> list[list[Any]]:
    """Return the description of arrays that lie one behind the other: name, element type, shape, offset in bytes."""
    described, offset = [], 0
    for name, array in zip(names, arrays, strict=True):
        described.append([name, array.dtype.str, array.shape, offset])
        offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return described


def write(arrays: Sequence[Array], target: memoryview | bytearray) -> None:
    """Copy arrays into ``target``, at the offsets that ``describe`` gives."""
    offset = 0
    for array in arrays:
        if array.nbytes:
            flat = np.frombuffer(target, array.dtype, array.size, offset)
            flat.reshape(array.shape)[...] = array
        offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT


def inline(arrays: Sequence[Array]) -> bytearray | None:
    """Return the arrays as the payload of a message; None if they are larger than ``MAX_INLINE``."""
    size = size_of(arrays)
    if size > MAX_INLINE:
        return None
    payload = bytearray(size)
    write(arrays, payload)
    return payload


def read(message: Message, block: memoryview | None) -> list[tuple[int | str, Array]]:
    """Return the tensors of a message as views of its payload, or of ``block`` if the message says so.

    Raises:
        ProtocolError: a description is not one, or reaches beyond the memory.
    """
    described = message.body.get("tensors", [])
    if not isinstance(described, list) or len(described) > MAX_TENSORS:
        raise ProtocolError(f"{message.kind.name}: tensors must be a list of at most {MAX_TENSORS} descriptions")
    is_shared = message.body.get("shared", False)
    if is_shared and block is None:
        raise ProtocolError(f"{message.kind.name}: its tensors lie in shared memory, and there is none")
    memory = block if is_shared and block is not None else memoryview(message.payload)
    return [_tensor(each, memory, message.kind.name) for each in described]


def _tensor(described: Any, memory: memoryview, kind: str) -> tuple[int | str, Array]:
    if not isinstance(described, list) or len(described) != 4:
        raise ProtocolError(f"{kind}: a tensor's description must be a name, an element type, a shape and an offset")
    name, element_type, shape, offset = described
    if not isinstance(name, (int, str)) or not isinstance(element_type, str) or element_type not in ELEMENT_TYPES:
        raise ProtocolError(f"{kind}: a tensor with the name {name!r} and the element type {element_type!r}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_size, (*shape, offset))):
        raise ProtocolError(f"{kind}: tensor {name!r} has the shape {shape!r} at the offset {offset!r}")
    dtype = np.dtype(element_type)
    count = math.prod(shape)
    if offset % ALIGNMENT or offset + count * dtype.itemsize > len(memory):
        raise ProtocolError(f"{kind}: tensor {name!r} reaches beyond the {len(memory)} bytes of its memory")
    if not count:
        return name, np.zeros(shape, dtype)
    return name, np.frombuffer(memory, dtype, count, offset).reshape(shape)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40

"""Tensors in messages: small ones inside the message, large ones in a block of shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .messages import MAX_INLINE, Body, Message, ProtocolError

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
    described = []
    offset = 0
    for name, array in zip(names, arrays, strict=True):
        described.append([name, array.dtype.str, array.shape, offset])
        offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return described


def write(arrays: Sequence[Array], target: memoryview | bytearray) -> None:
    """Copy arrays into ``target``, at the offsets that ``describe`` gives."""
    for view, array in zip(views(arrays, target, 0), arrays, strict=True):
        view[...] = array


def views(arrays: Sequence[Array], target: memoryview | bytearray, offset: int) -> list[Array]:
    """Return the parts of ``target``, from ``offset`` on, into which ``write`` copies arrays."""
    found: list[Array] = []
    for array in arrays:
        shape = array.shape
        dtype = array.dtype
        found.append(np.ndarray(shape, dtype, target, offset) if array.nbytes else np.empty(shape, dtype))
        offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return found


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
    body = message.body
    layout = body.layout if isinstance(body, Body) else None
    if layout is None:
        layout = _layout(message)
        if isinstance(body, Body):
            body.layout = layout
    if layout.is_shared and block is None:
        raise ProtocolError(f"{message.kind.name}: its tensors lie in shared memory, and there is none")
    memory = block if layout.is_shared and block is not None else memoryview(message.payload)
    size = len(memory)
    found: list[tuple[int | str, Array]] = []
    for name, dtype, shape, offset, end in layout.tensors:
        if end > size:
            raise ProtocolError(f"{message.kind.name}: tensor {name!r} reaches beyond the {size} bytes of its memory")
        found.append((name, np.ndarray(shape, dtype, memory, offset) if end > offset else np.zeros(shape, dtype)))
    return found


class TensorPlace(NamedTuple):
    """Where a tensor lies: from the byte ``offset`` to ``end`` of the memory of its message."""

    name: int | str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    end: int


class TensorLayout(NamedTuple):
    """The tensors of a message as it describes them, and whether they lie in shared memory."""

    tensors: list[TensorPlace]
    is_shared: bool


def _layout(message: Message) -> TensorLayout:
    described = message.body.get("tensors", [])
    if not isinstance(described, list) or len(described) > MAX_TENSORS:
        raise ProtocolError(f"{message.kind.name}: tensors must be a list of at most {MAX_TENSORS} descriptions")
    places = [_place(each, message.kind.name) for each in described]
    return TensorLayout(places, bool(message.body.get("shared", False)))


def _place(described: Any, kind: str) -> TensorPlace:
    if not isinstance(described, list) or len(described) != 4:
        raise ProtocolError(f"{kind}: a tensor's description must be a name, an element type, a shape and an offset")
    name, element_type, shape, offset = described
    if not isinstance(name, (int, str)) or not isinstance(element_type, str) or element_type not in ELEMENT_TYPES:
        raise ProtocolError(f"{kind}: a tensor with the name {name!r} and the element type {element_type!r}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_size, (*shape, offset))):
        raise ProtocolError(f"{kind}: tensor {name!r} has the shape {shape!r} at the offset {offset!r}")
    dtype = np.dtype(element_type)
    if offset % ALIGNMENT:
        raise ProtocolError(f"{kind}: tensor {name!r} at the offset {offset}, which is no multiple of {ALIGNMENT}")
    return TensorPlace(name, dtype, tuple(shape), offset, offset + math.prod(shape) * dtype.itemsize)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40

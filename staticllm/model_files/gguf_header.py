"""Reads the header of a GGUF file: its metadata and where its tensors lie. No tensor is read.

The file may contain anything: each number is compared with the bytes that are left before anything is allocated, so that what is
read is never larger than the file, nor than the limits below. The readers that convert a model trust these numbers.
"""

from __future__ import annotations

import math
import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from staticllm.errors import ModelError, quoted, shown
from staticllm.system.files import open_regular, remedy_of

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 256 << 20
"""The most bytes of metadata; a vocabulary of 256 k tokens with its merges has 16 MB."""
_WINDOW = 1 << 20
"""The bytes that are read at once of an array of texts."""
MAX_KEYS, MAX_TENSORS, MAX_DIMENSIONS, MAX_NAME = 1 << 16, 1 << 16, 4, 1 << 10
ALIGNMENT, MAX_ALIGNMENT = "general.alignment", 1 << 16
ARCHITECTURE, SPLITS, FILE_TYPE = "general.architecture", "split.count", "general.file_type"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""The types of numbers in metadata."""
_BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 31: ("Q4_0_4_4", 32, 18), 32: ("Q4_0_4_8", 32, 18), 33: ("Q4_0_8_8", 32, 18),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 36: ("IQ4_NL_4_4", 32, 18), 37: ("IQ4_NL_4_8", 32, 18),
    38: ("IQ4_NL_8_8", 32, 18), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""The types of tensors: name, numbers per block, bytes per block."""

_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S",
    22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS",
    31: "IQ1_M", 32: "BF16", 33: "Q4_0_4_4", 34: "Q4_0_4_8", 35: "Q4_0_8_8", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
    39: "NVFP4", 40: "Q1_0",
}  # fmt: skip
"""The values of ``general.file_type``: what a file as a whole is called, whose tensors have several types."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    """Begins with the axis that changes fastest."""
    kind: str
    offset: int
    """Counts from the file's first byte."""
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """The metadata and the tensors of a file. Arrays of numbers are NumPy arrays, those of texts are lists."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[GGUFTensor, ...]
    num_bytes: int

    @property
    def architecture(self) -> str:
        """What the file calls its architecture; empty if it does not say it."""
        return self.text(ARCHITECTURE)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def file_type(self) -> str:
        """The quantization of the file as a whole, such as ``Q4_K_M``; without one that of most weights."""
        number = self.number(FILE_TYPE)
        if number in _FILE_TYPES:
            return _FILE_TYPES[number]
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[tensor.kind] += math.prod(tensor.shape)
        return counts.most_common(1)[0][0] if counts else ""

    def text(self, key: str, default: str = "") -> str:
        """Return a text of the metadata; the default if it is missing or no text."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else default

    def number(self, key: str) -> int | None:
        """Return a whole number of the metadata; None if it is missing or something else."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def own(self, key: str) -> Any:
        """Return the value of a key behind the architecture's name; None if it is missing."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def whole(self, key: str) -> int | None:
        """Return a whole number behind the architecture's name, or that of all layers; None if there is none."""
        value = self.own(key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size and (value == value[0]).all():
            return int(value[0])
        return self.number(f"{self.architecture}.{key}")


class _DamagedError(ValueError):
    """What is wrong with the file, without its name."""


class _OtherVersionError(ValueError):
    """Why a file that may be whole cannot be read, without its name, and what helps."""


class _HeaderReader:
    """Reads values one after another, within the file and the limit."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file = file
        self.at = 0
        self.end = min(num_bytes, MAX_HEADER)
        self._is_cut = num_bytes <= MAX_HEADER

    def take(self, count: int, what: str) -> bytes:
        if count > self.end - self.at:
            limit = "the file ends" if self._is_cut else f"the header may have at most {MAX_HEADER} bytes"
            raise _DamagedError(f"{what} has {count} bytes at {self.at}, and {limit}")
        data = self._file.read(count)
        self.at += count
        if len(data) != count:
            raise _DamagedError(f"the file ends within {what}")
        return data

    def number(self, kind: int, what: str) -> int | float | bool:
        dtype = np.dtype(_NUMBERS[kind])
        value = np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()
        return bool(value) if kind == _BOOL else value

    def count(self, what: str, most: int) -> int:
        """Return a length of 64 bits."""
        (value,) = struct.unpack("<Q", self.take(8, what))
        if value > most:
            raise _DamagedError(f"{what} is {value}, at most {most} are possible")
        return int(value)

    def text(self, what: str, most: int = MAX_HEADER) -> str:
        return self.take(self.count(f"the length of {what}", most), what).decode("utf-8", "replace")

    def _texts(self, count: int, what: str) -> list[str]:
        """Return the next texts, as ``text`` does, but read in windows: a vocabulary has a hundred thousand of them."""
        found: list[str] = []
        while len(found) < count:
            start = self.at
            window = self._file.read(min(_WINDOW, self.end - start))
            place = 0
            while len(found) < count and place + 8 <= len(window):
                end = place + 8 + int.from_bytes(window[place : place + 8], "little")
                if end > len(window):
                    break
                found.append(window[place + 8 : end].decode("utf-8", "replace"))
                place = end
            self._file.seek(start + place)
            self.at = start + place
            if len(found) < count:  # one that the window cuts, or the file
                found.append(self.text(what))
        return found

    def value(self, what: str) -> Any:
        """Return a value of metadata with its type."""
        kind = int(self.number(4, f"the type of {what}"))
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _NUMBERS:
            raise _DamagedError(f"{what} has the unknown type {kind}")
        return self.number(kind, what)

    def _array(self, what: str) -> Any:
        kind = int(self.number(4, f"the type of {what}"))
        if kind == _STRING:
            count = self.count(f"the number of {what}", (self.end - self.at) // 8)
            return self._texts(count, what)
        if kind not in _NUMBERS:
            raise _DamagedError(f"{what} is an array of the type {kind}: only numbers and texts can be in arrays")
        dtype = np.dtype(_NUMBERS[kind])
        count = self.count(f"the number of {what}", (self.end - self.at) // dtype.itemsize)
        values = np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        return values.astype(bool) if kind == _BOOL else values


def read_gguf_header(path: Path) -> GGUFHeader:
    """Return the header of a file whose tensors lie completely in it.

    Raises:
        ModelError: the file cannot be read, is no GGUF, is damaged, truncated, or one of several parts.
    """
    try:
        with open_regular(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            header = _header(path, _HeaderReader(file, num_bytes), num_bytes)
    except OSError as error:
        raise ModelError(f"{quoted(path)} cannot be read ({error.strerror or error}): {remedy_of(error)}") from None
    except _DamagedError as error:
        raise ModelError(f"{quoted(path)} is damaged ({error}): download it again") from None
    except _OtherVersionError as error:
        raise ModelError(f"{quoted(path)} {error}") from None
    except MemoryError:
        raise ModelError(f"{quoted(path)} has more metadata than memory is free: close other programs") from None
    parts = header.number(SPLITS)
    if parts is not None and parts > 1:
        raise ModelError(
            f"{quoted(path)} is one of {parts} parts: join them with `gguf-split --merge` and give the whole file"
        )
    return header


def _header(path: Path, reader: _HeaderReader, num_bytes: int) -> GGUFHeader:
    if reader.take(4, "the magic number") != MAGIC:
        raise _DamagedError("it does not begin with GGUF")
    version = int(reader.number(4, "the version"))
    _check_version(version)
    num_tensors = reader.count("the number of tensors", MAX_TENSORS)
    num_keys = reader.count("the number of keys", MAX_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.text("a key", MAX_NAME)
        if key in metadata:
            raise _DamagedError(f"the key {shown(key)} is there twice")
        metadata[key] = reader.value(shown(key))
    infos = [_info(reader) for _ in range(num_tensors)]
    names = {name for name, _, _, _ in infos}
    if len(names) < len(infos):
        raise _DamagedError("two tensors have the same name")
    start = _aligned(reader.at, _alignment(metadata))
    tensors = tuple(_placed(info, start, num_bytes, _alignment(metadata)) for info in infos)
    for one, next_one in pairwise(sorted(tensors, key=lambda tensor: tensor.offset)):
        if one.offset + one.num_bytes > next_one.offset:
            raise _DamagedError(
                f"the tensors {shown(one.name)} and {shown(next_one.name)} share bytes at {next_one.offset}"
            )
    return GGUFHeader(path, metadata, tensors, num_bytes)


def _check_version(version: int) -> None:
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise _OtherVersionError(
            "is big-endian, and little-endian files can be read: download the file of the other order"
        )
    if version not in VERSIONS:
        remedy = (
            "download a newer file of the model" if version < VERSIONS[0] else "install a newer version of staticllm"
        )
        known = " and ".join(map(str, VERSIONS))
        raise _OtherVersionError(f"cannot be read (its version is {version}, and {known} can be read): {remedy}")


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get(ALIGNMENT, 32)
    if not isinstance(value, int) or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise _DamagedError(f"{ALIGNMENT} is {shown(value)}: it must be a power of two up to {MAX_ALIGNMENT}")
    return value


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


_Info = tuple[str, tuple[int, ...], int, int]


def _info(reader: _HeaderReader) -> _Info:
    """Return name, shape, type and offset of the next tensor."""
    name = reader.text("the name of a tensor", MAX_NAME)
    what = f"tensor {shown(name)}"
    num_dimensions = int(reader.number(4, f"the rank of {what}"))
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise _DamagedError(f"{what} has {num_dimensions} dimensions: 1 to {MAX_DIMENSIONS} are possible")
    shape = tuple(reader.count(f"a dimension of {what}", 1 << 40) for _ in range(num_dimensions))
    return name, shape, int(reader.number(4, f"the type of {what}")), reader.count(f"the offset of {what}", 1 << 62)


def _placed(info: _Info, start: int, num_bytes: int, alignment: int) -> GGUFTensor:
    """Return a tensor that lies in the file."""
    name, shape, kind, offset = info
    what = f"tensor {shown(name)}"
    if kind not in _BLOCKS:
        raise _DamagedError(f"{what} has the unknown type {kind}")
    type_name, per_block, block_bytes = _BLOCKS[kind]
    if 0 in shape or shape[0] % per_block:
        raise _DamagedError(
            f"{what} has the shape {list(shape)}, and rows of {type_name} have multiples of {per_block}"
        )
    size = math.prod(shape) // per_block * block_bytes
    if offset % alignment:
        raise _DamagedError(f"{what} begins at {offset}, which is no multiple of {alignment}")
    if start + offset + size > num_bytes:
        raise _DamagedError(f"{what} has {size} bytes at {start + offset}, and the file has {num_bytes}")
    return GGUFTensor(name, shape, type_name, start + offset, size)


def kinds_of(header: GGUFHeader) -> Iterator[str]:
    """Yield the types of the tensors, each once, in their order."""
    yield from dict.fromkeys(tensor.kind for tensor in header.tensors)

"""A snapshot stores a sequence in a file that is written atomically and read only into the model that made it.

A file consists of a magic line, the length and the digest of a header, the header (JSON), and a body: token ids, keys and
values, and recurrent states, in this order and in their memory layout. Shapes are not stored; they follow from the model.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from staticllm.errors import SnapshotError, quoted, shown
from staticllm.system.files import open_regular, whole_file

from .finite import is_finite
from .sequence import Conditions
from .stored import StoredLayout, StoredSequence

MAGIC, OLD_MAGIC = b"staticllm kv v3\n", b"staticllm rows"
MAX_HEADER = 1 << 16
DIGEST_BYTES = 32
PIECE = 1 << 24
Identity = Mapping[str, str]


@dataclass(frozen=True)
class _Header:
    identity: dict[str, str]
    num_tokens: int
    is_keyed: bool
    digest: str
    factors: int | None = None  # which RoPE factors made the keys; None in files of versions that did not know


def save(stored: StoredSequence, path: str | os.PathLike[str], identity: Identity, key: bytes = b"") -> None:
    """Write a sequence to ``path``; an interruption leaves the previous file unchanged.

    ``identity`` (the model and the KV type) must be the same when the file is read. A file that was written with a ``key`` can
    only be read with that key.

    Raises:
        SnapshotError: the file cannot be written.
    """
    target = _target(path)
    arrays = _arrays(stored)
    digest = _hash(key)
    for array in arrays:
        digest.update(_bytes_of(array))
    header = msgspec.json.encode(_header_of(stored, identity, key, digest.hexdigest()))
    try:
        with whole_file(target, mode=0o600) as file:
            file.write(MAGIC + len(header).to_bytes(4, "little") + _digest(header, key) + header)
            for array in arrays:
                file.write(_bytes_of(array))
    except OSError as error:
        raise SnapshotError(f"{shown(str(path))} cannot be written: {error.strerror or error}") from error


def _header_of(stored: StoredSequence, identity: Identity, key: bytes, digest: str) -> _Header:
    return _Header(dict(identity), len(stored.tokens), bool(key), digest, stored.conditions.factors)


def _factors_of(header: _Header, layout: StoredLayout, path: str | os.PathLike[str]) -> int:
    """Return which of the model's RoPE factors made the keys.

    Raises:
        SnapshotError: it is not known, or not one of them.
    """
    if layout.num_factors > 1 and header.factors is None:
        raise SnapshotError(
            f"{quoted(path)} was written by an earlier version, which did not note the RoPE factors: save it again"
        )
    factors = header.factors or 0
    if not 0 <= factors < layout.num_factors:
        raise SnapshotError(
            f"{quoted(path)} has keys of RoPE factors {factors}, the model takes {layout.num_factors} for its lengths: load it "
            "with a greater MAX_PROMPT_LEN + MIN_RESPONSE_LEN, or save it again with these"
        )
    return factors


def _target(path: str | os.PathLike[str]) -> Path:
    """Return the file to write; links are followed, and devices and folders are refused.

    Raises:
        SnapshotError: no file can be written there.
    """
    try:
        target = Path(path).resolve()
        if not target.name or (target.exists() and not target.is_file()):
            raise SnapshotError(f"{shown(str(path))} is not a file: give the path of a file")
    except (OSError, ValueError) as error:
        raise SnapshotError(
            f"{shown(str(path))} cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from error
    return target


def load(
    path: str | os.PathLike[str], identity: Identity, layout: StoredLayout, max_tokens: int, key: bytes = b""
) -> StoredSequence:
    """Return the sequence that ``save`` wrote: at most ``max_tokens`` tokens, with the shapes of ``layout``.

    Raises:
        SnapshotError: the file is missing, damaged or of another model, or has too many tokens or non-finite values.
    """
    try:
        with _explained(path), open_regular(Path(path)) as file:
            header = _read_header(file, path, key)
            for name in {**header.identity, **identity}:
                there = header.identity.get(name)
                here = identity.get(name)
                if there != here:
                    raise SnapshotError(
                        f"{shown(str(path))} is of another {name} ({there or 'none'}, here {here or 'none'}): save it again"
                    )
            count = header.num_tokens
            if not 0 < count <= max_tokens:
                raise SnapshotError(
                    f"{shown(str(path))} has {count} tokens, HOST_KV_SLOTS is {max_tokens}: load the model with more"
                )
            factors = _factors_of(header, layout, path)
            stored = _read_body(file, path, layout, count, header.digest, key)
            return replace(stored, conditions=Conditions(factors=factors))
    except MemoryError:
        raise SnapshotError(
            f"{shown(str(path))} does not fit into memory: close something, or load it elsewhere"
        ) from None


@contextlib.contextmanager
def _explained(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise SnapshotError(f"{shown(str(path))} is not there: save a snapshot first") from None
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SnapshotError(f"{shown(str(path))} cannot be read: {reason}") from None


def _read_header(file: BinaryIO, path: str | os.PathLike[str], key: bytes) -> _Header:
    start = file.read(len(MAGIC) + 4 + DIGEST_BYTES)
    length = int.from_bytes(start[len(MAGIC) : len(MAGIC) + 4], "little")
    if start.startswith(OLD_MAGIC):
        raise SnapshotError(f"{shown(str(path))} was written by an earlier version: save it again")
    if not start.startswith(MAGIC) or length > MAX_HEADER:
        raise _damaged(path)
    text = file.read(length)
    try:
        header = msgspec.json.decode(text, type=_Header)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise _damaged(path) from None
    if header.is_keyed is not bool(key):
        what = (
            "was saved with a key: give INTEGRITY_KEY"
            if header.is_keyed
            else "was saved without a key: leave INTEGRITY_KEY out"
        )
        raise SnapshotError(f"the snapshot {shown(str(path))} {what}, or save it again")
    if not hmac.compare_digest(start[-DIGEST_BYTES:], _digest(text, key)):
        raise _damaged(path, key)
    return header


def _read_body(
    file: BinaryIO, path: str | os.PathLike[str], layout: StoredLayout, count: int, expected: str, key: bytes
) -> StoredSequence:
    """Read the arrays after the header, which must have exactly the bytes of the model's own shapes."""
    shapes = [((count,), np.dtype(np.int64)), *layout.kv_shapes(count), *layout.states]
    left = os.fstat(file.fileno()).st_size - file.tell()
    needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
    if left != needed:
        raise SnapshotError(
            f"{shown(str(path))} has {left} bytes of keys and values, {count} tokens have {needed}: save it again"
        )
    digest = _hash(key)
    arrays = list[np.ndarray[Any, Any]]()
    for shape, dtype in shapes:
        array = np.empty(shape, dtype)
        view = _bytes_of(array)
        if file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise _damaged(path)
        digest.update(view)
        arrays.append(array)
    if not hmac.compare_digest(digest.hexdigest(), expected):
        raise _damaged(path, key)
    ids = arrays[0]
    kv = arrays[1 : 1 + len(layout.groups)]
    states = arrays[1 + len(layout.groups) :]
    if ids.min() < 0 or ids.max() >= layout.vocab_size:
        raise SnapshotError(
            f"{shown(str(path))} has token ids beyond the vocabulary of {layout.vocab_size}: save it again"
        )
    if not all(map(is_finite, (*kv, *states))):
        raise SnapshotError(
            f"{shown(str(path))} has numbers that are not finite: they would spoil every request; save it again"
        )
    return StoredSequence(tuple(ids.tolist()), tuple(kv), tuple(states))


def _arrays(stored: StoredSequence) -> list[np.ndarray[Any, Any]]:
    return [np.ascontiguousarray(array) for array in (stored.ids, *stored.kv, *stored.states)]


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of a contiguous array, of any shape, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def _hash(key: bytes) -> Any:
    """Return a new BLAKE2b hash (RFC 7693), keyed if there is a key."""
    return hashlib.blake2b(
        digest_size=DIGEST_BYTES, key=hashlib.sha256(key).digest() if key else b"", person=b"staticllm rows"
    )


def _digest(data: bytes, key: bytes) -> bytes:
    digest = _hash(key)
    digest.update(data)
    found: bytes = digest.digest()
    return found


def _damaged(path: str | os.PathLike[str], key: bytes = b"") -> SnapshotError:
    what = ", or was saved with another INTEGRITY_KEY" if key else ", or is no snapshot"
    return SnapshotError(f"{shown(str(path))} is damaged{what}: save it again")

"""Frames on a pipe between a pipeline and its worker processes: a JSON header and bytes, both of bounded length. No pickle."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

MAX_HEADER_BYTES, MAX_BODY_BYTES = 1 << 20, 1 << 28
_SIZES = struct.Struct("<4sII")
_MAGIC = b"sllm"


class FrameError(Exception):
    """What was read is not a whole frame, or its length exceeds a limit: the other process ended, or wrote something else."""


@dataclass(frozen=True)
class Frame:
    """One message."""

    header: dict[str, Any]
    body: bytes = b""


def write_frame(stream: IO[bytes], header: Mapping[str, object], body: bytes = b"") -> None:
    """Write one frame and flush it.

    Raises:
        FrameError: the header or the body is too long, or a value of the header is not plain JSON.
        OSError: the pipe is closed.
    """
    try:
        text = json.dumps(header, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise FrameError(f"a header cannot be written: {error}") from None
    _check(len(text), len(body))
    stream.write(_SIZES.pack(_MAGIC, len(text), len(body)) + text)
    stream.write(body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Frame | None:
    """Return the next frame; None at the end of the stream.

    Raises:
        FrameError: the stream ends within a frame, or holds something else.
    """
    start = stream.read(_SIZES.size)
    if not start:
        return None
    if len(start) < _SIZES.size:
        raise FrameError("the pipe ended within a frame")
    magic, num_header, num_body = _SIZES.unpack(start)
    if magic != _MAGIC:
        raise FrameError(f"{start!r} is not the start of a frame")
    _check(num_header, num_body)
    text, body = stream.read(num_header), stream.read(num_body)
    if len(text) < num_header or len(body) < num_body:
        raise FrameError("the pipe ended within a frame")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise FrameError(f"a header is a {type(header).__name__}, not an object")
    return Frame(header, body)


def _check(num_header: int, num_body: int) -> None:
    if num_header > MAX_HEADER_BYTES or num_body > MAX_BODY_BYTES:
        raise FrameError(
            f"a frame of {num_header} + {num_body} bytes: at most {MAX_HEADER_BYTES} + {MAX_BODY_BYTES} are allowed"
        )

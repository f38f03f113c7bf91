"""Limits of JSON bodies that are checked before parsing: a parser holds the interpreter's lock, and every stream with it."""

from __future__ import annotations

from collections.abc import Iterator

from staticllm.server.api_error import ApiError

MAX_STRUCTURES = 100_000
"""Arrays, objects and keys of a body. Ten thousand messages with a part each have 70,000."""
MAX_VALUES = 500_000
"""Elements of arrays and fields of objects, token ids among them."""
MAX_ESCAPES = 3_000_000
"""Escapes in texts; as many as the largest body by default has if it is written in ``\\uXXXX`` alone."""
DIGITS = 100
"""Digits that no number needs. A number of up to 200 may pass; the time of parsing grows with the square of their count."""
_SLICE = 256 << 10


def check_json(data: bytes) -> None:
    """Check that a body is parsed within a fraction of a second. Takes milliseconds; what texts hold does not count.

    Raises:
        ApiError: it has too many arrays, objects, keys, elements or escapes, or a number with too many digits (status 400).
    """
    if len(data) <= MAX_STRUCTURES:
        return
    num_escapes, max_escapes = data.count(b"\\"), max(MAX_ESCAPES, len(data) // 5)
    if num_escapes > max_escapes:
        raise _refused(f"{num_escapes} escapes in its texts, at most {max_escapes} are parsed: send UTF-8")
    if _is_small(_num_structures(data), data.count(b",")) and not _has_long_number(data):
        return
    num_structures = num_values = 0
    for part in outside_texts(data):
        num_structures += _num_structures(part)
        num_values += part.count(b",")
        if num_structures > MAX_STRUCTURES:
            raise _refused(f"more than {MAX_STRUCTURES} arrays, objects and keys: send several requests")
        if num_values > MAX_VALUES:
            raise _refused(f"more than {MAX_VALUES} elements: send several requests")
        if _has_long_number(part):
            raise _refused(f"a number of more than {DIGITS} digits: send a shorter one")


def outside_texts(data: bytes) -> Iterator[bytes]:
    """Yield what is outside of the texts of a JSON document, slice by slice, so that other threads run in between."""
    is_inside, held = False, b""
    for start in range(0, len(data), _SLICE):
        part = held + data[start : start + _SLICE]
        is_split = (len(part) - len(part.rstrip(b"\\"))) % 2 == 1  # an escape whose second half is in the next slice
        held = b"\\" if is_split else b""
        part = part.removesuffix(held).replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.split(b'"')
        yield b"".join(pieces[is_inside::2])
        is_inside ^= len(pieces) % 2 == 0


def _is_small(num_structures: int, num_values: int) -> bool:
    return num_structures <= MAX_STRUCTURES and num_values <= MAX_VALUES


def _num_structures(part: bytes) -> int:
    return part.count(b"[") + part.count(b"{") + part.count(b":")


def _has_long_number(part: bytes) -> bool:
    """Return whether ``DIGITS`` digits follow each other; seen for certain if twice as many do."""
    return any(part[start : start + DIGITS].isdigit() for start in range(0, len(part) - DIGITS + 1, DIGITS))


def _refused(what: str) -> ApiError:
    return ApiError(400, f"the body has {what}", code="body_too_complex")

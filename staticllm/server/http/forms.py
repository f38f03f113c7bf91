"""Bodies with files (``multipart/form-data``): read to temporary files within limits of size, time and number of parts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive

from staticllm.server.http.errors import ApiError, busy
from staticllm.server.http.limits import check_headers, too_large, too_slow

KNOB = "--max-upload-mb"
MAX_FIELDS = 64
MAX_FIELD_BYTES = 256 << 10
MORE_BYTES = 1 << 20
"""Bytes that fields, headers and boundaries may have beside the file."""
LIST_MARK = "[]"
"""The end of the names of fields that may be given several times."""


class Uploads:
    """Counts the uploads that are on this machine: they wait for a model in temporary files. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count one during a block.

        Raises:
            ApiError: 429: there are too many.
        """
        if self._count >= self._limit:
            raise busy(f"{self._count} recordings are uploaded or wait: try again later")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


@dataclass(frozen=True)
class Form:
    """A form with one file: the values of its other fields by name; those whose names end with ``[]`` are lists."""

    values: dict[str, Any]
    file: UploadFile


class _LimitedReceive:
    """Receives a body until it is larger than ``max_bytes``."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes + MORE_BYTES:
            raise too_large(self._max_bytes, KNOB)
        return message


async def read_form(request: Request, max_bytes: int, seconds: float) -> FormData:
    """Return the parts of a body, which ``close`` removes. Files are at most ``max_bytes`` long.

    Raises:
        ApiError: it is no form, damaged or has too many parts (400), is too large (413), or takes too long (408).
        ClientDisconnect: the client has gone.
    """
    from python_multipart.exceptions import FormParserError

    check_headers(request, max_bytes + MORE_BYTES, KNOB)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(
            400, f"Content-Type is {kind[:100]!r}: must be multipart/form-data, with the file", code="invalid_form"
        )
    limited = Request(request.scope, _LimitedReceive(request.receive, max_bytes))
    form = limited.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
    try:
        return await asyncio.wait_for(form, seconds)
    except TimeoutError:
        raise too_slow(seconds) from None
    except HTTPException as error:
        raise _invalid(str(error.detail)) from None
    except (FormParserError, UnicodeDecodeError, LookupError, ValueError) as error:
        raise _invalid(str(error) or type(error).__name__) from None


def checked_form(form: FormData, max_bytes: int) -> Form:
    """Return the file of a form, and its other fields. Those that are empty count as absent: a form has no null.

    Raises:
        ApiError: the file is missing, empty or too large, or a field is given twice.
    """
    values: dict[str, Any] = {}
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise ApiError(
            400, "Missing required parameter: 'file', with a file name", param="file", code="missing_required_parameter"
        )
    for name, value in form.multi_items():
        if value is file:
            continue
        if isinstance(value, UploadFile):
            raise ApiError(400, f"{name[:200]!r} is a file: must be a text", param=name[:200], code="invalid_value")
        if not value:
            continue
        if name.endswith(LIST_MARK):
            values.setdefault(name, []).append(value)
        elif name in values:
            raise ApiError(400, f"{name[:200]!r} is given twice: give it once", param=name[:200], code="invalid_value")
        else:
            values[name] = value
    if (file.size or 0) > max_bytes:
        raise too_large(max_bytes, KNOB)
    if not file.size:
        raise ApiError(400, "the file has 0 bytes: send a recording", param="file", code="invalid_value")
    return Form(values, file)


def _invalid(reason: str) -> ApiError:
    line = " ".join(reason.split())[:300]
    return ApiError(
        400, f"the body is no valid multipart/form-data: {line}", code="invalid_form", headers={"Connection": "close"}
    )

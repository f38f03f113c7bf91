"""The HTTP protocol of a connection: what is read in two ways is refused, and clients that are too slow are left."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from staticllm.server.http.errors import ApiError
from staticllm.server.settings import ServerSettings

MAX_HEAD = 64 << 10
"""Bytes of the request line and the headers together."""
_END = re.compile(rb"\n\r?\n")
_LONE = re.compile(rb"(?<!\r)\n|\r[^\n]")
_FOLDED = re.compile(rb"\n[ \t]")
_LENGTH = re.compile(rb"\ncontent-length[ \t]*:([^\r\n]*)", re.IGNORECASE)
_CODING = re.compile(rb"\ntransfer-encoding[ \t]*:", re.IGNORECASE)
_VERSION = re.compile(rb" HTTP/1\.([01])$")


class StrictConnection(h11.Connection):
    """h11's parser, which refuses what proxies read in another way: such a request could hide a second one from them.

    ``flaw`` says what was wrong with the last request, if this class refused it.
    """

    flaw = ""

    def next_event(self) -> Any:
        """Return the next event, as h11 does.

        Raises:
            h11.RemoteProtocolError: the request is not valid.
        """
        if self.their_state is h11.IDLE:
            self.flaw = flaw_of(self.trailing_data[0])
            if self.flaw:
                raise h11.RemoteProtocolError(self.flaw)
        return super().next_event()


def flaw_of(data: bytes) -> str:
    """Return what is wrong with a request that begins with these bytes, in a few words; "" if nothing is, so far.

    RFC 9112, sections 2.2, 5.2 and 6.1: recipients may read line feeds alone, folded headers, and two lengths in several ways.
    """
    end = _END.search(data)
    head = data if end is None else data[: end.start() + 1]
    if _FOLDED.search(head):
        return "a header is folded over several lines"
    if _LONE.search(head) or (end is not None and end.group() != b"\n\r\n"):
        return "a line does not end with CR LF"
    first, *_ = head.split(b"\r\n", 1)
    version = _VERSION.search(first)
    if version is None and len(first) < len(head):
        return "it is neither of HTTP/1.0 nor of HTTP/1.1"
    if _CODING.search(head) and (_LENGTH.search(head) or (version is not None and version[1] == b"0")):
        return "Transfer-Encoding excludes Content-Length and HTTP/1.0"
    lengths = _LENGTH.findall(head)
    if len(lengths) > 1 or any(b"," in length for length in lengths):
        return "Content-Length has several values"
    return ""


class TimedProtocol(H11Protocol):
    """uvicorn's protocol, which closes connections whose next request takes longer than ``header_seconds`` to begin, and those
    whose client takes nothing of what was sent for ``send_seconds``."""

    header_seconds = 10.0
    send_seconds = 120.0

    def __init__(self, config: Config, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.conn = StrictConnection(h11.SERVER, MAX_HEAD)
        self._strict = self.conn
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._stop_sending()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_sending()
        self._send_timer = self.loop.call_later(self.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_sending()
        super().resume_writing()
        if self.transport.get_write_buffer_size():  # the rest of an answer
            self._send_timer = self.loop.call_later(self.send_seconds, self._check_sent)

    def on_response_complete(self) -> None:
        if self._send_timer is None and self.transport.get_write_buffer_size():
            self._send_timer = self.loop.call_later(self.send_seconds, self._check_sent)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        flaw = self._strict.flaw
        super().send_400_response(f"{msg.removesuffix('.')}: {flaw}." if flaw else msg)
        self.refused(ApiError(400, msg, code="invalid_http"))

    def refused(self, error: ApiError) -> None:
        """Note that a request was refused."""

    def _check_sent(self) -> None:
        """End a connection that waits for its end, if its client takes nothing more."""
        self._send_timer = None
        if not self.transport.get_write_buffer_size():
            return
        if self.transport.is_closing():
            self.transport.abort()
        else:
            self._send_timer = self.loop.call_later(self.send_seconds, self._check_sent)

    def _stop_sending(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _watch(self) -> None:
        """Start the timer if headers are expected, and stop it if a request is in progress."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self.header_seconds, self._give_up)

    def _stop_watching(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()


def protocol_with(settings: ServerSettings, on_refusal: Callable[[ApiError], object]) -> type[TimedProtocol]:
    """Return the protocol with the limits of the settings. ``on_refusal`` gets errors of requests that are not valid HTTP."""

    class LimitedProtocol(TimedProtocol):
        """The protocol of one server."""

        header_seconds = settings.header_seconds
        send_seconds = settings.send_seconds

        def refused(self, error: ApiError) -> None:
            on_refusal(error)

    return LimitedProtocol

"""One connection of a client, served by a thread of its own, so that a client that stalls or lies harms only itself."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import replace
from typing import Any, Protocol

from staticllm.children.answers import failed, refused
from staticllm.daemon.clients.handlers import (
    DaemonControl,
    DaemonHandlers,
    InferHandlers,
    ModelHandlers,
    RequestHandlers,
)
from staticllm.daemon.clients.session import Session
from staticllm.errors import BusyError, StaticLLMError, last_line
from staticllm.wire.channel import Channel
from staticllm.wire.messages import EARLIER, QUIET, Kind, Message, ProtocolError

log = logging.getLogger(__name__)
REFUSE_SECONDS = 0.5
"""Seconds in which a client must read why its connection ends."""


class Host(DaemonControl, Protocol):
    """What connections need of the daemon."""

    def join(self, hello: Message, channel: Channel) -> tuple[Connection, dict[str, Any]]:
        """Add a connection to the client of a ``HELLO``, or to a new one; return it, and the body of the answer.

        Raises:
            StaticLLMError: it is refused.
        """
        ...

    def leave(self, session: Session) -> None:
        """End a client: its first connection has ended."""
        ...


class Greeting:
    """A connection whose client is not known yet. ``joined`` is what the host has added for it, also if ``wait`` failed then."""

    def __init__(self, channel: Channel, host: Host) -> None:
        self._channel = channel
        self._host = host
        self.started = time.monotonic()
        self.joined: Connection | None = None

    def wait(self) -> Connection | None:
        """Wait for the ``HELLO``, and return the connection that follows; None if it was refused, and is closed."""
        connection: Connection | None = None
        try:
            connection = self._greet()
        except (EOFError, OSError):
            pass
        except ProtocolError as error:
            refuse(self._channel, threading.Lock(), error)
        finally:
            if connection is None:
                self._channel.close()
        return connection

    def shut(self) -> None:
        self._channel.shut()

    def _greet(self) -> Connection | None:
        message = self._channel.receive()
        if message.kind is not Kind.HELLO:
            raise ProtocolError(f"the first message is {message.kind.name}, not HELLO")
        try:
            self.joined, body = self._host.join(message, self._channel)
        except StaticLLMError as error:
            self._channel.send(refused(error))
            return None
        try:
            self._channel.send(Message(Kind.WELCOME, body=body))
        except BaseException:
            self.joined.end()
            raise
        return self.joined


class Connection:
    """Serves one connection of a client until it ends: questions and answers alternate, quiet messages lie between them.

    A quiet ``RESET`` that failed is the answer to the next question of the connection, which is not carried out: its infer
    request is not in the states that the client expects. A ``RELEASE`` that failed concerns no later question.
    ``is_first``: the client ends with it.
    """

    def __init__(self, channel: Channel, host: Host, session: Session, is_first: bool) -> None:
        self.session = session
        self._channel = channel
        self._host = host
        self._is_first = is_first
        self._send_lock = threading.Lock()  # the thread of the outputs sends too
        self._late_error: Exception | None = None  # of a quiet RESET
        self._models = ModelHandlers(session)
        self._infer = InferHandlers(session, channel, self._send_lock)
        self._requests = RequestHandlers(session, channel, self._send_lock)
        self._daemon = DaemonHandlers(session, host)
        self._handlers = {
            **self._models.handlers, **self._infer.handlers, **self._requests.handlers, **self._daemon.handlers,
            Kind.RELEASE: self._release,
        }  # fmt: skip

    def run(self) -> None:
        """Serve the connection; returns when it has ended, with everything given back that belongs to it."""
        try:
            while True:
                self._answer(self._channel.receive())
        except (EOFError, OSError):
            pass
        except ProtocolError as error:
            self._requests.stop()
            refuse(self._channel, self._send_lock, error)
        finally:
            self.end()

    def shut(self) -> None:
        """Let ``run`` return soon, from another thread."""
        self._channel.shut()
        self._infer.cancel()  # its call may need many more device calls

    def end(self) -> None:
        """Give everything back that belongs to the connection, and close it."""
        self._daemon.close()
        self._requests.close()
        self._infer.close()
        self._models.close()
        self.session.count_block(-self._channel.block_bytes)
        if self._is_first:
            self._host.leave(self.session)
        self._channel.close()

    def _answer(self, message: Message) -> None:
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise ProtocolError(f"{message.kind.name} is not for the daemon")
        if message.flags & QUIET:
            self._obey(message)
            return
        late = self._late_error
        self._late_error = None
        try:
            answer = handler(message) if late is None else replace(failed(late), flags=EARLIER)
        except (ProtocolError, EOFError, BrokenPipeError, ConnectionError):
            raise
        except BusyError as error:
            answer = refused(error)
        except Exception as error:
            answer = failed(error)
        if answer is not None:
            with self._send_lock:
                self._channel.send(replace(answer, number=message.number))
        self._models.note_sent()

    def _obey(self, message: Message) -> None:
        """Carry out a message that gets no answer."""
        if message.kind not in (Kind.RESET, Kind.RELEASE):
            raise ProtocolError(f"{message.kind.name} must have an answer")
        try:
            self._handlers[message.kind](message)
            error = None
        except (ProtocolError, EOFError, BrokenPipeError, ConnectionError):
            raise
        except Exception as raised:
            log.warning("%s of %s %d: %s", message.kind.name, self.session.program, self.session.pid, last_line(raised))
            error = raised
        if message.kind is Kind.RESET:
            self._late_error = error

    def _release(self, message: Message) -> Message:
        if not self._infer.close():
            self.session.release(message.handle)
        return Message(Kind.OK)


def refuse(channel: Channel, lock: threading.Lock, error: ProtocolError) -> None:
    """Say why a connection ends. A client that does not read, so that a send waits, is not told. ``lock`` is held to send."""
    log.warning("a client sent something else than a message: %s", error)
    timer = threading.Timer(REFUSE_SECONDS, channel.shut)
    timer.daemon = True
    with contextlib.suppress(OSError, RuntimeError):  # the client has gone; there can be no more threads
        timer.start()
        try:
            with lock:
                channel.send(refused(error))
        finally:
            timer.cancel()
            timer.join()  # or it could shut another connection with the number of this one

"""Connects to the daemon of this user, and starts it if it does not run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from staticllm.children.answers import check
from staticllm.errors import ConfigError, DeviceError, ProcessLostError
from staticllm.wire import endpoint
from staticllm.wire.channel import Channel, Joined, join_daemon
from staticllm.wire.endpoint import EndpointError, GoneError, SilenceWatch, SilentError
from staticllm.wire.messages import MAX_FRAME, Message, ProtocolError

GONE = (
    "the process that runs the model has ended, and with it this request: send it again, which starts another process"
)

TOO_LONG = (
    f"a message of more than {MAX_FRAME} bytes cannot go to the daemon: shorten what the model is loaded with, or load it in "
    "this program (daemon=False, STATICLLM_ATTACH=off)"
)


class Startable(Protocol):
    """A daemon: where it listens, and how it is started."""

    @property
    def folder(self) -> Path:
        """Its runtime folder.

        Raises:
            EndpointError: it cannot be used.
        """
        ...

    def start(self) -> None:
        """Start it, and return when it listens.

        Raises:
            EndpointError: it does not in time.
        """
        ...


class DaemonLink:
    """This program as a client of the daemon, on one ``connection``. One thread at a time may call ``ask``.

    Raises:
        DeviceError: no daemon can be reached or started.
        StaticLLMError: it refused this program.
    """

    def __init__(self, home: Startable) -> None:
        try:
            self._folder = home.folder
            self._watch = SilenceWatch(self._folder)
            self.connection, welcome = self._join(home)
        except EndpointError as error:
            raise _unreachable(error) from error
        except (EOFError, OSError, ProtocolError) as error:
            raise ProcessLostError(GONE) from error
        try:
            check(welcome)
            self._pid = int(welcome.body["pid"])
        except BaseException:
            self.close()
            raise

    def ask(self, message: Message) -> Message:
        """Send a message, and return the answer.

        Raises:
            ProcessLostError: the daemon has gone, or its answer is damaged; another one may be started.
            StaticLLMError: as for the function ``ask``.
        """
        try:
            answer = _answer(self.connection, message)
        except ProtocolError as error:
            raise ProcessLostError(_damaged(error)) from error
        check(answer)
        return answer

    def check_silence(self) -> None:
        """Return if the daemon answers new connections, or has ended.

        Raises:
            SilentError: it does not answer.
        """
        self._watch.check()

    @property
    def was_stopped(self) -> bool:
        """Whether the daemon has ended as asked (``staticllm daemon stop``, SIGTERM), not by a crash or SIGKILL."""
        return endpoint.stopped_pid(self._folder) == self._pid

    def shut(self) -> None:
        """End this client; a thread that waits in ``ask`` gets a ``ProcessLostError``. Any thread may call."""
        self.connection.shut()

    def close(self) -> None:
        """End this client; the daemon frees all that it had. A second call does nothing."""
        self.connection.close()

    def _join(self, home: Startable) -> Joined:
        """Connect, and start the daemon if none listens.

        Raises:
            EndpointError: it does not listen in time.
        """
        priority = _priority() + 100
        try:
            return join_daemon(self._folder, self._watch.check, priority=priority)
        except SilentError:
            raise
        except EndpointError:
            home.start()
        return join_daemon(self._folder, self._watch.check, priority=priority)


def _unreachable(error: EndpointError) -> DeviceError | ProcessLostError:
    """Return the error of a daemon that cannot be reached; one that has just ended is started again by the next try."""
    message = f"the daemon cannot be reached: {error}"
    return ProcessLostError(message) if isinstance(error, GoneError) else DeviceError(message)


def _priority() -> int:
    """Return the priority that ``staticllm attach --priority`` gave to this program; 0 without one, from -100 to 100."""
    text = os.environ.get("STATICLLM_ATTACH_PRIORITY", "")
    return max(-100, min(100, int(text))) if text.lstrip("-").isdecimal() else 0


def ask(channel: Channel, message: Message) -> Message:
    """Send a message and return the answer.

    Raises:
        ConfigError: the message is too long.
        ProcessLostError: the daemon has gone.
        DeviceError: it does not answer, or its answer is damaged.
        StaticLLMError: it refused.
    """
    try:
        answer = _answer(channel, message)
    except ProtocolError as error:
        raise DeviceError(_damaged(error)) from error
    check(answer)
    return answer


def _answer(channel: Channel, message: Message) -> Message:
    """Send a message and return the answer, unchecked. Raises ``ProtocolError`` (it is damaged) and as ``ask``."""
    try:
        try:
            channel.send(message)
        except ProtocolError:
            raise ConfigError(TOO_LONG) from None
        return channel.receive()
    except SilentError as error:
        raise DeviceError(f"the daemon cannot be reached: {error}") from error
    except (EOFError, OSError) as error:
        raise ProcessLostError(GONE) from error


def _damaged(error: ProtocolError) -> str:
    return f"the daemon's answer is damaged: {error}"

"""The program's connections to the daemon: one that makes it a client, and one for each infer request."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..wire import endpoint
from ..wire.channel import Channel, Joined, join_daemon
from ..wire.endpoint import EndpointError, SilenceWatch, SilentError
from ..wire.messages import MAX_PRIORITY, QUIET, Kind, Message, ProtocolError
from .settings import Settings

EXCEPTIONS: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (RuntimeError, ValueError, TypeError, KeyError, IndexError, NotImplementedError, MemoryError)
}
POLL_SECONDS = 0.02
DEATHS_SECONDS = 60.0
"""Two ends of the daemon within this time: it is not used any more."""
RETRY_SECONDS = 30.0
"""After a failed start, calls do not wait for another one for this long."""
_started: list[subprocess.Popen[bytes]] = []  # kept, because a collected Popen warns about its living process


class UnavailableError(RuntimeError):
    """The daemon cannot be used, for the reason in the text."""


class RefusedError(UnavailableError):
    """The daemon does not take this program, model or request."""


class DaemonGoneError(RuntimeError):
    """The connection has ended in the middle of a call."""


def checked(answer: Message) -> Message:
    """Return an answer that carries a result.

    Raises:
        RefusedError: the daemon refused.
        ProtocolError: it is not an answer.
        Exception: the one that the call raised in the daemon.
    """
    if answer.kind is Kind.FAILED:
        raise _kind_of(answer)(str(answer.body.get("text", "")))
    if answer.kind is Kind.REFUSED:
        raise RefusedError(str(answer.body.get("reason", "the daemon refused")))
    if answer.kind not in (Kind.OK, Kind.DONE, Kind.WELCOME):
        raise ProtocolError(f"{answer.kind.name} is not an answer")
    return answer


def _kind_of(answer: Message) -> type[Exception]:
    """Return the class of an error, or the nearest base of it, that programs without our package have."""
    bases = answer.body.get("bases")
    names = [answer.body.get("type"), *(bases if isinstance(bases, list) else ())]
    return next((EXCEPTIONS[name] for name in names if isinstance(name, str) and name in EXCEPTIONS), RuntimeError)


class Client:
    """The program as a client of the daemon. Any thread may call the methods.

    ``epoch`` grows with each daemon that has welcomed the program: handles of earlier epochs mean nothing.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.epoch = 0
        self._priority = settings.priority
        self._control: Channel | None = None
        self._session = ""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._released: deque[tuple[int, int]] = deque()
        self._is_ahead = False  # of the daemon, which may not have carried out all releases
        self._deaths: list[float] = []
        self._dead_epoch = 0
        self._failure = ("", -RETRY_SECONDS)
        self._is_silent = False
        self._watch: SilenceWatch | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def call(self, message: Message) -> Message:
        """Ask the daemon on the first connection, and return its answer.

        Raises:
            UnavailableError: there is no daemon, or it refuses.
            DaemonGoneError: the connection has ended meanwhile.
            Exception: the one that the call raised in the daemon.
        """
        with self._held():
            answer = self._ask(self._connected(), message)
        return checked(answer)

    def compile(self, message: Message) -> tuple[Message, int]:
        """Ask for a model on a connection of its own, so that no other thread waits for its compilation.

        Return the answer, and the epoch to which its handle belongs.

        Raises:
            UnavailableError: there is no daemon, or it refuses.
            DaemonGoneError: the connection has ended meanwhile.
            Exception: the one that the call raised in the daemon.
        """
        self._settle()
        channel, epoch = self.open_channel()
        try:
            channel.send(message)
            answer = channel.receive()
        except SilentError as error:
            raise UnavailableError(str(error)) from error
        except (EOFError, OSError, ProtocolError) as error:
            with self._held():
                if self.epoch == epoch:
                    self._drop()
            raise DaemonGoneError(f"the daemon has gone: {error}") from error
        finally:
            channel.close()
        return checked(answer), epoch

    def open_channel(self) -> tuple[Channel, int]:
        """Return another connection of this client, and the epoch to which it belongs; the caller closes it.

        Raises:
            UnavailableError: there is no daemon, or it refuses.
        """
        with self._held():
            for attempt in range(2):
                self._connected()
                try:
                    return self._greet(session=self._session).channel, self.epoch
                except SilentError as error:
                    self._note_silence(str(error))
                    raise UnavailableError(str(error)) from error
                except (EndpointError, UnavailableError, OSError, EOFError, ProtocolError) as error:
                    self._drop()  # the daemon that welcomed the program has gone
                    if attempt:
                        raise UnavailableError(str(error)) from error
        raise AssertionError("unreachable")

    def connect(self) -> int:
        """Connect if there is no connection, and return the epoch.

        Raises:
            UnavailableError: no daemon can be reached, or it refused.
        """
        with self._held():
            self._connected()
            return self.epoch

    def set_priority(self, priority: int) -> None:
        """Set the priority of the program's calls, from -100 to 100."""
        self._priority = priority
        with contextlib.suppress(UnavailableError, DaemonGoneError):  # HELLO says it to the next daemon
            self.call(Message(Kind.HINT, body={"priority": priority + MAX_PRIORITY}))

    def release(self, handle: int, epoch: int) -> None:
        """Give a model back, without waiting for it: at once, or when the call ends in which this or another thread is."""
        self._released.append((handle, epoch))
        self._release_all()

    def has_died(self, epoch: int) -> None:
        """Count the end of the daemon of an epoch.

        Raises:
            UnavailableError: it is the second within a minute.
        """
        if epoch <= self._dead_epoch:
            return
        self._dead_epoch = epoch
        now = time.monotonic()
        self._deaths = [moment for moment in self._deaths if now - moment < DEATHS_SECONDS] + [now]
        if len(self._deaths) > 1:
            where = endpoint.runtime_folder(create=False) / "daemon.log"
            self._failure = (f"the daemon has ended twice within a minute, {where} may say why", now)
            raise UnavailableError(self._failure[0])

    def close(self) -> None:
        """End the connection; the daemon frees all that belongs to the program."""
        with self._lock:
            self._drop()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the lock, and send what was released meanwhile, also by the garbage collection in this thread."""
        try:
            with self._lock:
                yield
        finally:
            self._release_all()

    def _settle(self) -> None:
        """Wait until the daemon has carried out all releases: models that it still holds count for the limit."""
        with self._held():
            self._send_releases()
            if self._is_ahead and self._control is not None:
                with contextlib.suppress(DaemonGoneError):
                    self._ask(self._control, Message(Kind.PING))

    def _release_all(self) -> None:
        """Send what was released, unless another thread has the lock, which does it then."""
        while self._released and self._lock.acquire(blocking=False):
            try:
                self._send_releases()
            finally:
                self._lock.release()

    # all below: the lock is held

    def _connected(self) -> Channel:
        if self._pid != os.getpid() or self._is_silent:
            self._drop()
            self._is_silent = False
        if self._control is not None:
            return self._control
        self._pid = os.getpid()
        reason, moment = self._failure
        if reason and time.monotonic() - moment < RETRY_SECONDS:
            raise UnavailableError(reason)
        try:
            self._control, welcome = self._greet_or_start()
        except (EndpointError, UnavailableError, OSError, EOFError, ProtocolError) as error:
            self._failure = (str(error) or "the daemon does not answer", time.monotonic())
            raise UnavailableError(self._failure[0]) from error
        self._session = str(welcome.body.get("session", ""))
        self._released.clear()
        self.epoch += 1
        return self._control

    def _greet_or_start(self) -> Joined:
        try:
            return self._greet()
        except SilentError as error:  # another one cannot listen there
            raise UnavailableError(str(error)) from error
        except (EndpointError, EOFError, OSError) as error:
            if not self.settings.daemon_command:
                raise UnavailableError(f"{error}: staticllm daemon start starts one") from error
        folder = endpoint.runtime_folder()
        process = start_daemon(self.settings.daemon_command, folder)
        end = time.monotonic() + self.settings.wait_seconds
        while True:
            try:
                return self._greet()
            except (EndpointError, EOFError, OSError) as error:
                if time.monotonic() > end:
                    failed = f", it ended with code {process.returncode}" if process.poll() else ""
                    raise UnavailableError(
                        f"the daemon does not answer after {self.settings.wait_seconds:g} s ({error}{failed}): "
                        f"{folder / 'daemon.err'} may say why"
                    ) from error
            time.sleep(POLL_SECONDS)

    def _greet(self, **more: Any) -> Joined:
        """Connect. Raises ``RefusedError`` (the daemon refused), and as ``join_daemon`` does."""
        folder = endpoint.runtime_folder()
        self._watch = self._watch or SilenceWatch(folder)
        joined = join_daemon(folder, self._check_silence, priority=self._priority + MAX_PRIORITY, **more)
        try:
            checked(joined.answer)
        except BaseException:
            joined.channel.close()
            raise
        return joined

    def _ask(self, channel: Channel, message: Message) -> Message:
        with self._dropping():
            channel.send(message)
            answer = channel.receive()
        self._is_ahead = False
        return answer

    def _tell(self, channel: Channel, message: Message) -> None:
        with self._dropping():
            channel.send(message)

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        """Drop the connection if an exchange of messages on it is not completed."""
        try:
            yield
        except SilentError as error:
            raise UnavailableError(str(error)) from error
        except (EOFError, OSError, ProtocolError) as error:
            self._drop()
            raise DaemonGoneError(f"the daemon has gone: {error}") from error
        except BaseException:  # the answer would be taken for that of the next question
            self._dead_epoch = self.epoch
            self._drop()
            raise

    def _check_silence(self) -> None:
        """Look whether the daemon still answers; without the lock, which a thread that waits for an answer holds.

        Raises:
            SilentError: it does not.
        """
        if self._watch is not None:
            try:
                self._watch.check()
            except SilentError as error:
                self._note_silence(str(error))
                raise

    def _note_silence(self, reason: str) -> None:
        """Let no other call wait for a daemon that does not answer; the next one but a while looks for it anew."""
        self._failure = (reason, time.monotonic())
        self._is_silent = True

    def _send_releases(self) -> None:
        while self._released:
            handle, epoch = self._released.popleft()
            if epoch != self.epoch or self._control is None or self._pid != os.getpid():
                continue  # it was given back with the connection, or belongs to the parent process
            self._is_ahead = True
            with contextlib.suppress(DaemonGoneError, UnavailableError):
                self._tell(self._control, Message(Kind.RELEASE, handle, flags=QUIET))

    def _drop(self) -> None:
        control = self._control
        self._control = None
        self._is_ahead = False
        if control is not None:
            control.close()

    def _forget(self) -> None:
        """Forget in a forked child what belongs to the parent."""
        self._lock = threading.Lock()
        self._watch = None
        self._drop()


def start_daemon(command: tuple[str, ...], folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one and its terminal; it is not attached itself."""
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP
    environment = {**os.environ, "STATICLLM_ATTACH": "off"}
    with (folder / "daemon.err").open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, creationflags=flags,
            start_new_session=sys.platform != "win32", cwd=folder, env=environment,
        )  # fmt: skip
    _started.append(process)
    return process

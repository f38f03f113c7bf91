"""A process that this one starts, asks over its pipes, and ends within a bounded time; and the child's side of the pipes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from staticllm.system.posix import after_fork, kill_group
from staticllm.wire import endpoint
from staticllm.wire.messages import Message, ProtocolError, read_message, write_message

LOOK_SECONDS = 0.02
DAEMON_SECONDS = 60.0
"""Seconds in which a new daemon must listen, on a busy machine as well."""
OTHER_SECONDS = 15.0
"""Seconds in which a daemon must listen that another program has started meanwhile."""
LOST_SECONDS = 5.0
"""Grace period for a process that answered something else than a message, in seconds."""
END_SECONDS = 5.0
"""Seconds in which a process must end whose pipes are closed."""
LAST_BYTES = 500
"""The most bytes of stderr that an error quotes."""


Own = TypeVar("Own", bound="Child")
_detached: list[subprocess.Popen[bytes]] = []  # kept, because a collected Popen warns about its living process


class ChildLostError(RuntimeError):
    """A child process ended, or wrote something else than a message; the text says how. ``code``: its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Child:
    """A child process, in a group of its own: Ctrl-C reaches this process only. Any thread may call ``kill``.

    A ``with`` block ends it: at once with its descendants if an exception leaves the block, Ctrl-C too.

    Args:
        command: The program and its arguments.
        environment: Variables beside those of this process. The child is not attached to a daemon itself.
        folder: Its working directory; None for that of this process.
        errors: The file that takes its stderr; None for that of this process.
        has_pipes: Whether ``ask`` talks with it over stdin and stdout; without, they are closed.
        is_detached: Whether it outlives this process and its terminal.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        errors: Path | None = None,
        has_pipes: bool = False,
        is_detached: bool = False,
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "STATICLLM_ATTACH"}
        stream = subprocess.PIPE if has_pipes else subprocess.DEVNULL
        flags = 0
        if sys.platform == "win32":
            flags = subprocess.CREATE_NEW_PROCESS_GROUP | (subprocess.DETACHED_PROCESS if is_detached else 0)
        with contextlib.ExitStack() as files:
            self.process = subprocess.Popen(
                list(command), stdin=stream, stdout=stream, cwd=folder, creationflags=flags,
                stderr=None if errors is None else files.enter_context(errors.open("wb")),
                start_new_session=sys.platform != "win32", env={**inherited, **(environment or {})},
            )  # fmt: skip

        if is_detached:
            _detached[:] = [each for each in _detached if each.poll() is None]  # or they stay as zombies
            _detached.append(self.process)

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        if kind is not None:  # it may not read its pipe, and would be waited for
            self.kill_all()
        self.end(END_SECONDS)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, on POSIX systems negative for a signal; None while it runs."""
        return self.process.poll()

    @property
    def is_usable(self) -> bool:
        """Whether the process runs, and its pipes are open."""
        return self.exit_code is None and self.process.stdin is not None and not self.process.stdin.closed

    def wait_until(self, is_ready: Callable[[], bool], seconds: float) -> bool:
        """Return True as soon as ``is_ready()``, and False when the process has ended or ``seconds`` have passed."""
        moment = time.monotonic() + seconds
        while time.monotonic() < moment and self.exit_code is None:
            if is_ready():
                return True
            time.sleep(LOOK_SECONDS)
        return False

    def ask(self, message: Message, seconds: float | None = None) -> Message:
        """Send a message and return the answer; the process is killed after ``seconds``. One thread at a time may call.

        Raises:
            TimeoutError: there was no answer in time.
            ChildLostError: the process has ended, and was ended if it did not answer with a message.
        """
        if seconds is None:
            return self._ask(message)
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self.kill()

        limit = threading.Timer(seconds, give_up)
        limit.daemon = True
        limit.start()
        try:
            return self._ask(message)
        except ChildLostError:
            if is_late.is_set():
                raise TimeoutError from None
            raise
        finally:
            limit.cancel()

    def kill(self) -> None:
        """End the process at once; a thread that waits in ``ask`` gets a ``ChildLostError``."""
        self.process.kill()

    def kill_all(self) -> None:
        """End the process and its descendants at once, except those that have made sessions of their own.

        A process that has ended by itself is no longer asked for its descendants.
        """
        if self.exit_code is not None:
            return
        if sys.platform == "win32":
            import psutil

            descendants: list[psutil.Process] = []
            with contextlib.suppress(psutil.Error):
                descendants = psutil.Process(self.pid).children(recursive=True)
            self.process.kill()
            for each in descendants:
                with contextlib.suppress(psutil.Error):
                    each.kill()
        else:
            kill_group(self.pid)

    def end(self, seconds: float) -> int:
        """Close the pipes, or terminate a process without, wait for its end, kill it after ``seconds``; return its exit code."""
        process = self.process
        if process.stdin is None:
            process.terminate()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not written is lost with the process
                    pipe.close()
        return self.wait(seconds)

    def wait(self, seconds: float) -> int:
        """Wait for the end of the process, kill it after ``seconds``, and return its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        except BaseException:
            self.process.kill()
            raise

    def _ask(self, message: Message) -> Message:
        process = self.process
        assert process.stdin is not None, "it has no pipes"
        assert process.stdout is not None, "it has no pipes"
        try:
            write_message(process.stdin, message)
            answer = read_message(process.stdout)
        except (ProtocolError, OSError, ValueError) as error:  # ValueError: closed meanwhile
            raise self._lost(str(error)) from error
        if answer is None:
            raise self._lost("it closed its pipe")
        return answer

    def _lost(self, reason: str) -> ChildLostError:
        code = self.end(LOST_SECONDS)
        return ChildLostError(f"by signal {-code}" if code < 0 else f"with code {code}, {reason}", code)


def last_words(errors: Path) -> str:
    """Return the last line that a child wrote into its ``errors``, as far as an error quotes it; empty if there is none."""
    lines = errors.read_text("utf-8", "replace").split("\n") if errors.is_file() else []
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return "".join(each if each.isprintable() else "?" for each in said[:LAST_BYTES])


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the child's stream of questions and that of its answers; stderr takes the place of stdout.

    Processes that are forked from this one close both: if this one is killed, its parent must see their end. OpenVINO's
    telemetry forks when it is imported, on a thread; the parent has reported the start, so a child does not.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children after Ctrl-C
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    for pipe in (answers.fileno(), 0):
        after_fork(partial(os.close, pipe))
    return sys.stdin.buffer, answers


def python_command(module: str) -> list[str]:
    """Return the command that runs ``main`` of a module with this interpreter and its places of modules.

    They are set after the interpreter has started: as ``PYTHONPATH``, a ``types.py`` beside a user's script would be taken for
    that of the standard library. An application that is frozen into one program has no interpreter.
    """
    paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 - "" is the working directory
    return [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}; from {module} import main; main()"]


def daemon_command() -> list[str]:
    """Return the command that is a daemon in the foreground, as ``staticllm attach`` gave it, or of this interpreter.

    A frozen application is its own interpreter: it must pass its arguments on to ``staticllm.cli.main``.
    """
    given: list[str] = json.loads(os.environ.get("STATICLLM_DAEMON_COMMAND", "[]"))
    base = [sys.executable] if getattr(sys, "frozen", False) else [sys.executable, "-m", "staticllm"]
    return given or [*base, "daemon", "start", "--foreground"]


def start_daemon(folder: Path, options: Sequence[str] = ()) -> None:
    """Start the daemon of a runtime folder in the background, and return when it, or another program's, listens.

    Raises:
        EndpointError: none listens in time.
    """
    begin = time.monotonic()
    errors = folder / "daemon.err"
    try:
        child = Child([*daemon_command(), *options], folder=folder, errors=errors, is_detached=True)
    except OSError as error:
        raise endpoint.EndpointError(f"the daemon could not be started: {error}") from error
    if child.wait_until(partial(endpoint.answers, folder), DAEMON_SECONDS):
        return
    if child.exit_code == 1:  # another one was faster, or it has failed
        moment = time.monotonic() + OTHER_SECONDS
        while time.monotonic() < moment:
            if endpoint.answers(folder):
                return
            time.sleep(LOOK_SECONDS)
    said = errors.read_text("utf-8", "replace").strip()[-LAST_BYTES:]
    raise endpoint.EndpointError(
        f"the daemon does not listen after {time.monotonic() - begin:.0f} s: see {folder / 'daemon.log'}"
        + (f"; {said}" if said else "")
    )

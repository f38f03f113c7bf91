"""A child process that answers line by line, and whose descendants may hold its pipes longer than it lives."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from staticllm.children.child import LOOK_SECONDS, Child, ChildLostError
from staticllm.system.threads import start_thread

MAX_LINE = 1 << 20
"""The most bytes of a line that is read."""
MAX_WAITING = 64
"""The most lines that are read before they are asked for."""
LAST_SECONDS = 1.0
"""How long the last lines of a child that has ended are waited for."""
END_SECONDS = 5.0


class LineChild(Child):
    """A child process that is told lines and answers with lines of text.

    ``Child.ask`` waits for the end of the pipe to learn that its process has ended. Under Wine, servers that the process has
    started inherit the pipe and outlive it by seconds, so here a thread reads the lines, and the caller also looks at the
    process. ``kill`` ends the process and its descendants, except those that made sessions of their own.

    Args and errors are those of ``Child``; ``StaticLLMError``: there are no more threads.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        errors: Path | None = None,
    ) -> None:
        encoded = {"PYTHONUTF8": "1", **(environment or {})}  # Python's own encoding of pipes is not UTF-8 on Windows
        super().__init__(command, environment=encoded, folder=folder, errors=errors, has_pipes=True)
        assert self.process.stdout is not None, "it has pipes"
        self._lines: queue.Queue[bytes] = queue.Queue(MAX_WAITING)
        self._is_ended = threading.Event()
        try:
            self._reader = start_thread(self._read, "staticllm-lines")
        except BaseException:
            self.kill()
            super().end(END_SECONDS)
            raise

    def tell(self, line: str) -> None:
        """Write a line.

        Raises:
            ChildLostError: the process does not read any more, and was ended.
        """
        assert self.process.stdin is not None, "it has pipes"
        assert "\n" not in line, "it is one line"
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except (OSError, ValueError) as error:  # ValueError: closed meanwhile
            raise self._lost_child(str(error)) from None

    def next_line(self, moment: float) -> str:
        """Return the next line without its end. The process and its descendants are killed at ``moment`` (``time.monotonic``).

        Bytes that are not UTF-8 are replaced.

        Raises:
            TimeoutError: there was no line in time.
            ChildLostError: the process has ended, or was ended because a line is longer than ``MAX_LINE``.
        """
        ended: float | None = None
        while True:
            if time.monotonic() >= moment and self.exit_code is None:  # also if lines never stop
                self.kill()
                self.end(END_SECONDS)
                raise TimeoutError
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=LOOK_SECONDS)
                if len(line) > MAX_LINE:
                    raise self._lost_child(f"a line has more than {MAX_LINE} bytes")
                return line.rstrip(b"\r\n").decode("utf-8", "replace")
            now = time.monotonic()
            if self.exit_code is not None:
                ended = now if ended is None else ended
                if (not self._reader.is_alive() or now - ended > LAST_SECONDS) and self._lines.empty():
                    raise self._lost_child("it closed its pipe")
            elif not self._reader.is_alive() and self._lines.empty():
                raise self._lost_child("it closed its pipe")

    def kill(self) -> None:
        """End the process and its descendants at once."""
        self.kill_all()

    def end(self, seconds: float) -> int:
        """Close stdin, wait for the end of the process, kill it and its descendants after ``seconds``; return its exit code."""
        self._is_ended.set()
        assert self.process.stdin is not None, "it has pipes"
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        if not self.wait_until(lambda: False, seconds):
            self.kill()
        return self.wait(seconds)

    def _read(self) -> None:
        """Read lines until the pipe ends, on a thread of its own."""
        stream = self.process.stdout
        assert stream is not None, "it has pipes"
        with contextlib.suppress(OSError, ValueError), stream:
            while line := stream.readline(MAX_LINE + 2):
                self._put(line)

    def _put(self, line: bytes) -> None:
        """Wait until the caller has taken earlier lines; drop the line at the end of the process."""
        while not self._is_ended.is_set():
            with contextlib.suppress(queue.Full):
                self._lines.put(line, timeout=LOOK_SECONDS)
                return

    def _lost_child(self, reason: str) -> ChildLostError:
        self.kill()
        code = self.end(END_SECONDS)
        return ChildLostError(f"by signal {-code}" if code < 0 else f"with code {code}, {reason}", code)

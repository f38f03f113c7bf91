"""Starts, finds and ends the daemon of a user; there is at most one for each runtime folder."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from staticllm.children.answers import check
from staticllm.children.child import start_daemon
from staticllm.children.parent_watch import ParentWatch
from staticllm.daemon.limits import DaemonLimits
from staticllm.errors import ProcessLostError, StaticLLMError
from staticllm.pipelines.daemon_client.daemon_link import ask
from staticllm.wire.channel import Channel, join_daemon
from staticllm.wire.endpoint import EndpointError, SilenceWatch, SilentError
from staticllm.wire.messages import PROTOCOL, Kind, Message, ProtocolError

STOP_SECONDS = 15.0
LOG_BYTES = 1 << 20
OTHER_PROTOCOL = re.compile(r"speaks protocol \d+, the daemon (\d+):")
"""How a daemon of another version refuses a program: its protocol is the group."""


def serve(folder: Path, limits: DaemonLimits | None = None, worker_of: int | None = None) -> None:
    """Run the daemon of a runtime folder until it is stopped or idle for too long. Logs to ``daemon.log``.

    Args:
        worker_of: The only process that this daemon serves; the daemon ends with it.

    Raises:
        StaticLLMError: another daemon serves this folder.
        ConfigError: there is no process ``worker_of``.
    """
    from staticllm.daemon.process.daemon import (
        Daemon,  # the daemon alone needs the devices: its clients start faster without
    )

    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StaticLLMError(f"a daemon serves {folder} already: staticllm daemon stop ends it") from None
    daemon = None
    try:
        _log_into(folder / "daemon.log")
        daemon = Daemon(folder, limits, is_worker=worker_of is not None)
        watch = None if worker_of is None else ParentWatch(worker_of, daemon.stop)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: daemon.stop())
        daemon.run()
        if watch is not None:
            watch.close()
    finally:
        for name in ("socket", "pipe", "key") if daemon is None or daemon.owns_folder else ():
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)
        lock.release()


def start(folder: Path, idle_seconds: float | None = None) -> int:
    """Start a daemon in the background, unless one serves the folder already, and return its process id when it listens.

    Raises:
        StaticLLMError: it does not listen in time; the message names its log.
    """
    found = status(folder)
    if found is None:
        try:
            start_daemon(folder, () if idle_seconds is None else ("--idle-seconds", str(idle_seconds)))
        except EndpointError as error:
            raise StaticLLMError(str(error)) from None
        found = status(folder)
    if found is None:
        raise StaticLLMError(f"the daemon has ended at once: see {folder / 'daemon.log'}")
    return int(found["pid"])


def stop(folder: Path) -> int | None:
    """End the daemon of a folder, and return its process id when it has ended; None if there is none.

    A daemon of another version is addressed in its own protocol: ``STATS`` and ``STOP`` are the same in all versions.

    Raises:
        StaticLLMError: it has not ended after ``STOP_SECONDS``.
    """
    protocol = PROTOCOL
    try:
        found = status(folder)
    except StaticLLMError as error:
        other = OTHER_PROTOCOL.search(str(error))
        if other is None:
            raise
        protocol = int(other[1])
        found = status(folder, protocol)
    if found is None:
        return None
    with contextlib.suppress(EndpointError, ProcessLostError, EOFError, OSError), control(folder, protocol) as channel:
        ask(channel, Message(Kind.STOP))
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=STOP_SECONDS)
    except Timeout:
        raise StaticLLMError(f"the daemon {found['pid']} has not ended after {STOP_SECONDS:g} s") from None
    lock.release()
    return int(found["pid"])


def status(folder: Path, protocol: int = PROTOCOL) -> dict[str, Any] | None:
    """Return the statistics of the daemon of a folder; None if none listens.

    Raises:
        StaticLLMError: it does not answer, or refused.
    """
    try:
        with control(folder, protocol) as channel:
            return ask(channel, Message(Kind.STATS)).body
    except SilentError as error:
        raise StaticLLMError(str(error)) from None
    except (EndpointError, ProcessLostError, EOFError, OSError):
        return None


@contextmanager
def control(folder: Path, protocol: int = PROTOCOL) -> Iterator[Channel]:
    """Connect to the daemon of a folder as a client without models.

    Raises:
        EndpointError: none listens.
        StaticLLMError: its answer is damaged, or it refused.
    """
    try:
        channel, answer = join_daemon(folder, SilenceWatch(folder).check, watches=True, protocol=protocol)
    except ProtocolError as error:
        raise StaticLLMError(f"the daemon's answer is damaged: {error}") from error
    try:
        check(answer)
        yield channel
    finally:
        channel.close()


def _log_into(path: Path) -> None:
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("staticllm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

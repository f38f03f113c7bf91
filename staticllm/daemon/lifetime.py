"""Starts, finds and ends the daemon of a user; there is at most one for each runtime folder."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from staticllm.daemon.limits import Limits
from staticllm.errors import StaticLLMError
from staticllm.pipelines.daemon_client.failures import check
from staticllm.system.parent_watch import ParentWatch
from staticllm.wire import endpoint
from staticllm.wire.channel import Channel
from staticllm.wire.endpoint import EndpointError, SilentError
from staticllm.wire.messages import PROTOCOL, Kind, Message, ProtocolError
from staticllm.wire.silence import SilenceWatch

START_SECONDS, OTHER_SECONDS = 60.0, 15.0
"""Seconds in which a new daemon must listen, on a busy machine as well, and one that another program has started meanwhile."""
STOP_SECONDS = 15.0
LOG_BYTES = 1 << 20


def serve(folder: Path, limits: Limits | None = None, worker_of: int | None = None) -> None:
    """Be the daemon of a runtime folder until it is stopped, or idle for long. Log into ``daemon.log``.

    ``worker_of``: the process that this daemon works for alone, and with which it ends.

    Raises:
        StaticLLMError: another daemon serves this folder.
        ConfigError: there is no process ``worker_of``.
    """
    from staticllm.daemon.server import Daemon  # the daemon alone needs the devices: its clients start faster without

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
        StaticLLMError: it does not listen within ``START_SECONDS``; the message names its log.
    """
    found = status(folder)
    if found is not None:
        return int(found["pid"])
    command = [sys.executable, "-m", "staticllm", "daemon", "start", "--foreground"]
    command += [] if idle_seconds is None else ["--idle-seconds", str(idle_seconds)]
    process = _spawn(command, folder)
    begin = time.monotonic()
    until, is_ours = begin + START_SECONDS, True
    while time.monotonic() < until:
        found = status(folder)
        if found is not None:
            return int(found["pid"])
        code = process.poll()
        if code not in (None, 1):
            break
        if code == 1 and is_ours:  # another one was faster, or it has failed
            until, is_ours = time.monotonic() + OTHER_SECONDS, False
        time.sleep(0.05)
    seconds = time.monotonic() - begin
    raise StaticLLMError(f"the daemon does not listen after {seconds:.0f} s: see {folder / 'daemon.log'}")


def stop(folder: Path) -> int | None:
    """End the daemon of a folder, and return its process id when it has ended; None if there is none.

    Raises:
        StaticLLMError: it has not ended after ``STOP_SECONDS``.
    """
    found = status(folder)
    if found is None:
        return None
    with contextlib.suppress(EndpointError, EOFError, OSError), control(folder) as channel:
        ask(channel, Message(Kind.STOP))
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=STOP_SECONDS)
    except Timeout:
        raise StaticLLMError(f"the daemon {found['pid']} has not ended after {STOP_SECONDS:g} s") from None
    lock.release()
    return int(found["pid"])


def status(folder: Path) -> dict[str, Any] | None:
    """Return the statistics of the daemon of a folder; None if none listens.

    Raises:
        StaticLLMError: it refused to answer, or does not answer.
    """
    try:
        with control(folder) as channel:
            return ask(channel, Message(Kind.STATS)).body
    except SilentError as error:
        raise StaticLLMError(str(error)) from None
    except (EndpointError, EOFError, OSError):
        return None


@contextmanager
def control(folder: Path) -> Iterator[Channel]:
    """Connect to the daemon of a folder as a client without models.

    Raises:
        EndpointError: none listens.
        StaticLLMError: it refused this client.
    """
    import openvino

    channel = Channel(endpoint.connect(folder))
    channel.watch(SilenceWatch(folder).check)
    try:
        body = {
            "protocol": PROTOCOL,
            "openvino": openvino.get_version(),
            "pid": os.getpid(),
            "program": Path(sys.argv[0]).name[:256],
            "watches": True,
        }
        ask(channel, Message(Kind.HELLO, body=body))
        yield channel
    finally:
        channel.close()


def ask(channel: Channel, message: Message) -> Message:
    """Send a message and return the answer.

    Raises:
        StaticLLMError: the daemon refused it, or it failed.
    """
    channel.send(message)
    try:
        answer = channel.receive()
    except ProtocolError as error:
        raise StaticLLMError(f"the daemon's answer is damaged: {error}") from error
    check(answer)
    return answer


def _spawn(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one and its terminal."""
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP
    environment = {name: value for name, value in os.environ.items() if name != "STATICLLM_ATTACH"}
    with (folder / "daemon.err").open("wb") as errors:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, creationflags=flags,
            start_new_session=sys.platform != "win32", cwd=folder, env=environment,
        )  # fmt: skip


def _log_into(path: Path) -> None:
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("staticllm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

"""Where the pipeline of a chat model runs: in the daemon of this user, or in a worker process of the server's own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from staticllm.errors import ClosedError, ProcessLostError
from staticllm.pipelines.artifacts.crashes import LIMIT, count_crash, crash_name, quarantine_text
from staticllm.pipelines.artifacts.used_sets import forget_sets, read_sets
from staticllm.pipelines.daemon_client.daemon_home import UserDaemon
from staticllm.pipelines.daemon_client.remote_engine import RemoteEngine
from staticllm.wire import endpoint
from staticllm.wire.endpoint import EndpointError

START_SECONDS = 60.0
"""Seconds in which a worker process must listen; it loads its model later."""
LOOK_SECONDS = 0.02
END_SECONDS = 10.0
"""Seconds that a worker process has to end before it is killed."""
DEAD_SECONDS = 2.0
"""Seconds until a process whose connections have ended must have ended itself."""
PREFIX = "w"
_log = logging.getLogger("staticllm.server")


class ModelHome(UserDaemon):
    """The daemon of this user, for one model of the server. ``on_lost`` is called on some thread when it has ended.

    Calls of one thread at a time, except ``is_lost``.
    """

    starts_at_once = False
    """Whether the model is loaded again at once when its process has ended, or by the next request."""

    def __init__(self, name: str, on_lost: Callable[[], object]) -> None:
        self.name = name
        self._on_lost = on_lost
        self._engine: RemoteEngine | None = None

    def adopt(self, engine: RemoteEngine) -> None:
        """Note the engine of the model."""
        self._engine, engine.on_lost = engine, self._on_lost

    @property
    def is_lost(self) -> bool:
        """Whether the model was loaded here, and its process has ended."""
        return self._engine is not None and not self._engine.is_connected

    def calls_after(self, number: int) -> dict[str, Any]:
        """Return what the engine of the model does, from the call ``number`` on. Any thread may call.

        Raises:
            ClosedError: no model is loaded, or its process has ended.
        """
        engine = self._engine
        if engine is None:
            raise ClosedError("the model is not loaded")
        return engine.calls_after(number)

    def reconnect(self) -> None:
        """Load the model again. Takes as long as loading.

        Raises:
            StaticLLMError: that failed.
        """
        assert self._engine is not None, "no model was loaded"
        self._engine.reconnect()

    def close(self) -> None:
        """Give up what belongs to this server; the pipeline is closed. A second call does nothing."""
        self._engine = None


class WorkerHome(ModelHome):
    """A daemon of this server's own, with one model: a crash of the device layer ends that process, and not the server."""

    starts_at_once = True
    resumes_requests = False
    """Not: a crash is counted against the blob set, and a request may be its cause. Clients decide whether they send it again."""

    def __init__(self, name: str, on_lost: Callable[[], object]) -> None:
        super().__init__(name, on_lost)
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        """The private runtime folder of the process.

        Raises:
            EndpointError: it cannot be made.
        """
        if self._folder is None:
            base = endpoint.runtime_folder()
            _sweep(base)
            folder = base / f"{PREFIX}{os.getpid()}-{secrets.token_hex(2)}"
            try:
                folder.mkdir(mode=0o700)
            except OSError as error:
                raise EndpointError(f"the folder {folder} cannot be made: {error.strerror}") from None
            self._folder = folder
        return self._folder

    @property
    def pid(self) -> int | None:
        """The id of the process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the process; after a crash of the one before, that is counted against its blob set.

        Raises:
            EndpointError: it does not listen in time.
            ProcessLostError: it crashed or was killed meanwhile.
        """
        self._bury()
        folder = self.folder
        environment = {name: value for name, value in os.environ.items() if name != "STATICLLM_ATTACH"}
        flags = 0
        if sys.platform == "win32":
            flags = subprocess.CREATE_NEW_PROCESS_GROUP
        try:
            self._process = subprocess.Popen(
                worker_command(os.getpid()), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, creationflags=flags,
                start_new_session=sys.platform != "win32",  # Ctrl-C is for the server, which ends the process afterwards
                env={**environment, "STATICLLM_RUNTIME_DIR": str(folder)},
            )  # fmt: skip
        except OSError as error:
            raise EndpointError(f"the process of {self.name!r} cannot be started: {error.strerror}") from None
        _log.info("process %d runs %r", self._process.pid, self.name)
        moment = time.monotonic() + START_SECONDS
        while time.monotonic() < moment and self._process.poll() is None:
            with contextlib.suppress(EndpointError, OSError):
                endpoint.connect(folder).close()
                return
            time.sleep(LOOK_SECONDS)
        code = self._process.poll()
        if code is not None and (code < 0 or crash_name(code) is not None):
            raise ProcessLostError(
                f"the process of {self.name!r} was ended while it started ({code}): send the request again"
            )
        why = f"it ended with exit code {code}" if code is not None else f"it does not listen after {START_SECONDS:g} s"
        raise EndpointError(f"the process of {self.name!r} cannot be started: {why}")

    def close(self) -> None:
        """End the process and remove its folder. A second call does nothing."""
        super().close()
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            _wait(process, END_SECONDS)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _bury(self) -> None:
        """Wait for the end of the process before, and note what it crashed with."""
        process, self._process = self._process, None
        if process is None or self._folder is None:
            return
        code = _wait(process, DEAD_SECONDS)
        crash = crash_name(code)
        _log.warning("the process of %r has ended (%s)", self.name, crash or f"exit code {code}")
        for path in read_sets(self._folder) if crash is not None else ():
            num = count_crash(Path(path), str(crash))
            if num >= LIMIT:
                _log.error("%r: %s", self.name, quarantine_text(Path(path)))
        forget_sets(self._folder)


def worker_command(pid: int) -> list[str]:
    """Return the command of a worker process for process ``pid``.

    A frozen application is its own interpreter: it must pass its arguments on to ``staticllm.cli.main``.
    """
    given = json.loads(os.environ.get("STATICLLM_DAEMON_COMMAND", "[]"))  # set by staticllm attach
    command = [part for part in given if part != "--foreground"]
    base = [sys.executable] if getattr(sys, "frozen", False) else [sys.executable, "-m", "staticllm"]
    return [*(command or [*base, "daemon", "start"]), "--worker-of", str(pid)]


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait for the end of a process, and kill it if that takes longer than ``seconds``; return its exit code."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _sweep(base: Path) -> None:
    """Remove the folders of servers that were killed."""
    for folder in base.glob(f"{PREFIX}*-*"):
        owner = folder.name[len(PREFIX) :].partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)

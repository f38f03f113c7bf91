"""Where the pipeline of a chat model runs: in the daemon of this user, or in a worker process of the server's own."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from staticllm.children.child import Child, daemon_command
from staticllm.compiler_passes.artifacts.crashes import (
    LIMIT,
    count_crash,
    crash_name,
    forget_sets,
    quarantine_text,
    read_sets,
)
from staticllm.errors import ClosedError, ProcessLostError
from staticllm.pipelines.daemon_client.remote_engine import RemoteEngine, UserDaemon
from staticllm.wire import endpoint
from staticllm.wire.endpoint import EndpointError

START_SECONDS = 60.0
"""Seconds in which a worker process must listen; it loads its model later."""
END_SECONDS = 10.0
"""Grace period for a worker process that was told to end, in seconds."""
DEAD_SECONDS = 2.0
"""Grace period for a process whose connections have ended, in seconds."""
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
        self._engine = engine

    def on_lost(self) -> object:
        """Tell the server that the process has ended. Runs on the thread of the engine's connection."""
        return self._on_lost()

    @property
    def is_lost(self) -> bool:
        """Whether the model was loaded here, and its process has ended."""
        return self._engine is not None and not self._engine.is_connected

    @property
    def engine(self) -> RemoteEngine:
        """The engine of the model. Any thread may read it.

        Raises:
            ClosedError: no model is loaded.
        """
        engine = self._engine
        if engine is None:
            raise ClosedError("the model is not loaded")
        return engine

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
        self._process: Child | None = None

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
            endpoint.check_length(folder)
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
        command = [*daemon_command(), "--worker-of", str(os.getpid())]
        try:
            process = Child(command, environment={"STATICLLM_RUNTIME_DIR": str(folder)})
            self._process = process
        except OSError as error:
            raise EndpointError(f"the process of {self.name!r} cannot be started: {error.strerror}") from None
        _log.info("process %d runs %r", process.pid, self.name)
        if process.wait_until(partial(endpoint.answers, folder), START_SECONDS):
            return
        code = process.exit_code
        if code is not None and (code < 0 or crash_name(code) is not None):
            raise ProcessLostError(
                f"the process of {self.name!r} was ended while it started ({code}): send the request again"
            )
        why = f"it ended with exit code {code}" if code is not None else f"it does not listen after {START_SECONDS:g} s"
        raise EndpointError(f"the process of {self.name!r} cannot be started: {why}")

    def close(self) -> None:
        """End the process and remove its folder. A second call does nothing."""
        super().close()
        process = self._process
        self._process = None
        if process is not None:
            process.end(END_SECONDS)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _bury(self) -> None:
        """Wait for the end of the process before, and note what it crashed with."""
        process = self._process
        self._process = None
        if process is None or self._folder is None:
            return
        code = process.wait(DEAD_SECONDS)
        crash = crash_name(code)
        _log.warning("the process of %r has ended (%s)", self.name, crash or f"exit code {code}")
        for path in read_sets(self._folder) if crash is not None else ():
            num = count_crash(Path(path), str(crash))
            if num >= LIMIT:
                _log.error("%r: %s", self.name, quarantine_text(Path(path)))
        forget_sets(self._folder)


def _sweep(base: Path) -> None:
    """Remove the folders of servers that were killed."""
    for folder in base.glob(f"{PREFIX}*-*"):
        owner = folder.name[len(PREFIX) :].partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)

"""One server of a user per port: the second one learns who has it."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from filelock import FileLock, Timeout

from staticllm.errors import ConfigError
from staticllm.system.files import read_regular, whole_file
from staticllm.wire import endpoint

MAX_NOTE = 1 << 16


class PortInUseError(ConfigError):
    """Another process has the port."""


class PortLock:
    """Holds the lock of a port, with a note that says which process has it and at which URL it serves.

    The system frees the lock when the process ends, however it ends. Where this user has no runtime folder, no lock is held:
    the address of the socket alone keeps two servers apart.

    Raises:
        PortInUseError: another server has it.
    """

    def __init__(self, port: int, url: str) -> None:
        self._lock, self._note = None, None
        folder = _folder()
        if folder is None:
            return
        lock = FileLock(folder / f"{port}.lock", mode=0o600)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise PortInUseError(_line(folder, port)) from None
        except OSError:  # the folder is full or read-only
            return
        self._lock, self._note = lock, folder / f"{port}.json"
        with contextlib.suppress(OSError), whole_file(self._note, mode=0o600) as file:
            file.write(json.dumps({"pid": os.getpid(), "url": url}).encode())

    def close(self) -> None:
        """Free the port. A second call does nothing."""
        if self._lock is None or self._note is None:
            return
        for path in (self._note, Path(self._lock.lock_file)):  # Windows refuses to remove a file that is open
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self._lock.release()
        self._lock = None


def server_at(port: int) -> str | None:
    """Return the line that says which server of this user has a port; None if none has."""
    folder = _folder()
    if folder is None or not (folder / f"{port}.lock").exists():
        return None
    try:
        with FileLock(folder / f"{port}.lock", timeout=0, mode=0o600):
            return None  # its server was killed
    except Timeout:
        return _line(folder, port)
    except OSError:
        return None


def _line(folder: Path, port: int) -> str:
    try:
        note = json.loads(read_regular(folder / f"{port}.json", MAX_NOTE))
        return (
            f"a server already runs at {note['url']} (process {note['pid']}): use or stop it, or choose another --port"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return f"another server starts at port {port}: choose another --port"


def _folder() -> Path | None:
    try:
        folder = endpoint.runtime_folder() / "ports"
        folder.mkdir(mode=0o700, exist_ok=True)
    except (endpoint.EndpointError, OSError):
        return None
    return folder

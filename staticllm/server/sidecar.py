"""What an application needs that ships the server: a signal that it serves, and one server of a user per port."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from staticllm.errors import ConfigError, quoted
from staticllm.system.files import read_regular, whole_file
from staticllm.system.posix import is_read_only
from staticllm.wire import endpoint

MODE = 0o600
"""Only this user may read a ready file, which may hold a key. Windows takes the permissions of the folder instead."""
MAX_NOTE = 1 << 16


@dataclass(frozen=True)
class Ready:
    """What the application gets: the URL ends in ``/v1``, and ``key`` is None if the server needs none."""

    url: str
    port: int
    key: str | None
    pid: int
    models: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps({**vars(self), "models": list(self.models)}) + "\n"


class ReadySignal:
    """Writes a ``Ready`` to a file, a file descriptor, both, or neither.

    Raises:
        ConfigError: the descriptor is not open for writing, or the file cannot be written.
    """

    def __init__(self, fd: int | None = None, file: Path | None = None) -> None:
        self._fd = fd
        self._file = None if file is None else file.absolute()
        self._is_written = False
        if fd is not None:
            _check_descriptor(fd)
        if self._file is not None:
            _remove_stale(self._file)

    def write(self, ready: Ready) -> None:
        """Tell the application. The descriptor is closed, so that it reads the end of the file.

        Raises:
            ConfigError: it cannot be written, for example because the reading process has ended.
        """
        data = ready.to_json().encode()
        if self._file is not None:
            try:
                with whole_file(self._file, mode=MODE) as file:
                    file.write(data)
            except OSError as error:
                raise ConfigError(f"--ready-file {quoted(self._file)} cannot be written: {error.strerror}") from None
            self._is_written = True
        if self._fd is not None:
            fd = self._fd
            self._fd = None
            try:
                with os.fdopen(fd, "wb") as pipe:
                    pipe.write(data)
            except OSError as error:
                raise ConfigError(f"--ready-fd {fd} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Remove the file that was written, unless another server has written it since, and close the descriptor."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None
        if self._is_written and self._file is not None:
            self._is_written = False
            with contextlib.suppress(OSError, ValueError):
                if json.loads(self._file.read_bytes()).get("pid") == os.getpid():
                    self._file.unlink()


def _check_descriptor(fd: int) -> None:
    """Check that a descriptor is open, and keep it from the processes that this one starts.

    Raises:
        ConfigError: it is not, or this is Windows, where programs inherit handles, not descriptors.
    """
    try:
        is_source = is_read_only(fd)
    except NotImplementedError:
        raise ConfigError(f"--ready-fd {fd}: Windows passes no file descriptors on, use --ready-file") from None
    except (OSError, OverflowError):
        raise ConfigError(f"--ready-fd {fd} is not open: let the process inherit it (pass_fds)") from None
    if is_source:
        raise ConfigError(f"--ready-fd {fd} is open for reading only: pass the writing end of the pipe")
    os.set_inheritable(fd, False)


def _remove_stale(path: Path) -> None:
    """Remove the file of a server that was killed, and check that a new one can be written.

    Raises:
        ConfigError: it cannot, or something else is there.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"--ready-file {quoted(path)} is a folder: name a file")
        path.unlink(missing_ok=True)
        with whole_file(path, mode=MODE):
            pass
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--ready-file {quoted(path)} cannot be written: {error.strerror}") from None


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
        self._lock = None
        self._note = None
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
        self._lock = lock
        self._note = folder / f"{port}.json"
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
        folder = endpoint.private_folder() / "ports"
        folder.mkdir(mode=0o700, exist_ok=True)
    except (endpoint.EndpointError, OSError):
        return None
    return folder

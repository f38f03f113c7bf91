"""Where the daemon of a user listens, and how both sides make sure that the other one belongs to the same user."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing import connection as mp
from pathlib import Path
from typing import Any

from .held_files import patiently

KEY_BYTES = 32
ANSWER_SECONDS = 30.0
"""Seconds in which a daemon must answer a new connection; a thread of its own does, whatever the devices do."""
PROBE_SECONDS = 10.0
"""Seconds without an answer after which a client checks that the daemon still answers new connections."""
STOPPED = "stopped"
"""The file with the number of a daemon that ended as asked; its programs do not start another one for running requests."""
RETRY_SECONDS = 0.05
MAX_UNIX_PATH = 100  # sockets allow 104 to 108


class EndpointError(RuntimeError):
    """The runtime folder, the key or the peer is not one of this user."""


class SilentError(EndpointError):
    """A daemon listens, but does not answer: its process is stopped or overloaded."""


class GoneError(EndpointError):
    """No daemon listens any more, or it closed the connection before it answered."""


class InTime:
    """A connection whose messages must come within ``ANSWER_SECONDS``, for ``multiprocessing``'s challenges."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.send_bytes = connection.send_bytes

    def recv_bytes(self, max_length: int | None = None) -> bytes:
        """Return the next message.

        Raises:
            TimeoutError: none comes in time.
            EOFError: the peer has gone.
            OSError: the connection is broken.
        """
        if not self._connection.poll(ANSWER_SECONDS):
            raise TimeoutError
        message: bytes = self._connection.recv_bytes(max_length)
        return message


def runtime_folder(create: bool = True) -> Path:
    """Return the folder of the daemon's socket, key and log: only this user may enter it.

    ``STATICLLM_RUNTIME_DIR`` names another one.

    Raises:
        EndpointError: its path is too long for a socket, it is relative, it cannot be made, or others own it or may enter it.
    """
    check_length(_folder_path())
    return private_folder(create)


def private_folder(create: bool = True) -> Path:
    """Return the runtime folder for files alone, whose paths may be longer than those of sockets.

    Raises:
        EndpointError: as for ``runtime_folder``, except the length.
    """
    folder = _folder_path()
    if not folder.is_absolute():  # the daemon and child processes have other working directories
        raise EndpointError(f"the runtime folder {folder} is relative: set STATICLLM_RUNTIME_DIR to an absolute path")
    try:
        if create:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise EndpointError(
            f"the runtime folder {folder} cannot be used ({error.strerror}): set STATICLLM_RUNTIME_DIR to a folder of yours"
        ) from error
    if hasattr(os, "getuid"):
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise EndpointError(f"the runtime folder {folder} is not a folder of this user: set STATICLLM_RUNTIME_DIR")
        if found.st_mode & 0o077:
            raise EndpointError(
                f"others may enter the runtime folder {folder} (mode {stat.S_IMODE(found.st_mode):o}): chmod 700 it"
            )
    return folder


def _folder_path() -> Path:
    given = os.environ.get("STATICLLM_RUNTIME_DIR")
    if given:
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", tempfile.gettempdir())) / "staticllm" / "run"
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "staticllm" if base else Path(tempfile.gettempdir()) / f"staticllm-{os.getuid()}"


def address(folder: Path) -> str:
    """Return the address of the daemon of this folder.

    Raises:
        EndpointError: none listens, or the path is too long.
    """
    if sys.platform == "win32":
        try:
            return (folder / "pipe").read_text("ascii")
        except OSError:
            raise GoneError(f"no daemon listens in {folder}") from None
    check_length(folder)
    return str(folder / "socket")


def check_length(folder: Path) -> None:
    """Check that a folder can hold a socket.

    Raises:
        EndpointError: its path is too long.
    """
    path = os.fsencode(folder / "socket")
    if len(path) > MAX_UNIX_PATH and sys.platform != "win32":
        raise EndpointError(
            f"the runtime folder {folder} makes the path of a socket {len(path)} bytes long, {MAX_UNIX_PATH} are possible: "
            "set STATICLLM_RUNTIME_DIR to a shorter path"
        )


def read_key(folder: Path) -> bytes:
    """Return the key that both sides must know.

    Raises:
        EndpointError: there is none yet, or it is damaged.
    """
    try:
        key = (folder / "key").read_bytes()
    except OSError as error:
        raise EndpointError(f"the daemon's key in {folder} cannot be read: {error.strerror}") from None
    if len(key) != KEY_BYTES:
        raise EndpointError(f"the daemon's key in {folder} has {len(key)} bytes instead of {KEY_BYTES}: delete it")
    return key


def make_key(folder: Path) -> bytes:
    """Write a new key, which only this user may read, and return it. Called by a daemon when it starts."""
    key = secrets.token_bytes(KEY_BYTES)
    _write(folder / "key", key)
    return key


def _write(path: Path, data: bytes) -> None:
    """Write a small file that only this user may read. Who reads it meanwhile reads the one before."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
        patiently(partial(scratch.replace, path))
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def note_stop(folder: Path) -> None:
    """Write that this process, a daemon, ends as asked; called before its connections end. A full disk is ignored."""
    with contextlib.suppress(OSError):
        (folder / STOPPED).write_text(str(os.getpid()), "ascii")


def forget_stop(folder: Path) -> None:
    """Remove the note of a daemon before, whose number this process may have."""
    with contextlib.suppress(OSError):
        (folder / STOPPED).unlink(missing_ok=True)


def stopped_pid(folder: Path) -> int | None:
    """Return the number of the last daemon that ended as asked; None if the last one was killed, or still runs."""
    try:
        return int((folder / STOPPED).read_text("ascii"))
    except (OSError, ValueError):
        return None


def listen(folder: Path, wait_seconds: float | None = None) -> mp.Listener:
    """Return the daemon's listener, which does not check keys yet; the lock of the only daemon must be held.

    Args:
        wait_seconds: After so long without a connection, ``accept`` raises a ``TimeoutError`` (not for the pipes of
            Windows). A signal that reaches another thread, as after a suspension, is handled by the thread that accepts
            only when it returns.

    Raises:
        EndpointError, OSError: the address cannot be used.
    """
    if sys.platform == "win32":
        listener = mp.Listener(rf"\\.\pipe\staticllm-{secrets.token_hex(16)}", "AF_PIPE")
        _write(folder / "pipe", str(listener.address).encode("ascii"))
        return listener
    path = address(folder)
    Path(path).unlink(missing_ok=True)
    old = os.umask(0o177)
    try:
        listener = mp.Listener(path, "AF_UNIX", backlog=64)
        listener._listener._socket.settimeout(wait_seconds)  # type: ignore[attr-defined]  # accepted ones are blocking again
        return listener
    finally:
        os.umask(old)


def connect(folder: Path) -> Any:
    """Return a connection to the daemon of this folder; both sides have proved that they know the key.

    Raises:
        SilentError: the daemon does not answer.
        GoneError: no daemon listens there, or it ended meanwhile.
        EndpointError: it does not know the key, or it belongs to another user.
    """
    where = address(folder)
    key = read_key(folder)
    try:
        connection = _dial(where)
    except BlockingIOError:
        raise SilentError(silence_of(where)) from None
    except OSError as error:
        raise GoneError(f"no daemon listens at {where}: {error.strerror or error}") from None
    try:
        check_peer(connection)
        mp.answer_challenge(InTime(connection), key)  # type: ignore[arg-type]  # needs only the methods that it has
        mp.deliver_challenge(InTime(connection), key)  # type: ignore[arg-type]
    except TimeoutError:
        connection.close()
        raise SilentError(silence_of(where)) from None
    except (EOFError, OSError):
        connection.close()
        raise GoneError(f"the daemon at {where} closed the connection: it has ended, or has too many clients") from None
    except AuthenticationError as error:
        connection.close()
        raise EndpointError(f"the daemon at {where} does not accept the key in {folder}: {error}") from None
    except BaseException:
        connection.close()
        raise
    return connection


def _dial(where: str) -> Any:
    """Connect without proving anything. Raises ``BlockingIOError`` and ``OSError``."""
    if sys.platform == "win32":
        return mp.Client(where)
    end = time.monotonic() + ANSWER_SECONDS
    with socket.socket(socket.AF_UNIX) as peer:
        peer.setblocking(False)  # or connect() would wait without limit for a place in the backlog
        while True:
            try:
                peer.connect(where)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(RETRY_SECONDS)
            else:
                peer.setblocking(True)
                return mp.Connection(peer.detach())


def listens(folder: Path) -> bool:
    """Return whether a daemon listens in a folder.

    Raises:
        SilentError: one does, but does not answer.
    """
    try:
        connect(folder).close()
    except SilentError:
        raise
    except (EndpointError, OSError):
        return False
    return True


def answers(folder: Path) -> bool:
    """Return whether a daemon listens in a folder and answers; one that is silent while it starts may answer later."""
    try:
        return listens(folder)
    except SilentError:
        return False


def silence_of(where: object) -> str:
    """Return the text of a ``SilentError``."""
    return (
        f"the daemon at {where} has not answered for {ANSWER_SECONDS:g} s: if its process is stopped, continue it"
        f"{' (kill -CONT)' if sys.platform != 'win32' else ''}, "
        "else end it, and try again"
    )


def knock(folder: Path) -> None:
    """Connect and leave at once, so that a listener wakes.

    Raises:
        EndpointError, OSError: no daemon listens.
    """
    if sys.platform == "win32":
        mp.Client(address(folder)).close()
        return
    with socket.socket(socket.AF_UNIX) as peer:
        peer.setblocking(False)  # the one that knocks may be the only one that accepts
        peer.connect(address(folder))


def identity(folder: Path) -> os.stat_result | None:
    """Return what identifies the socket of a folder; None on Windows, or if there is none.

    As long as a socket listens, no other gets the same identity.
    """
    try:
        return None if sys.platform == "win32" else Path(address(folder)).stat()
    except (OSError, EndpointError):
        return None


def close_listener(listener: mp.Listener, leaves_socket: bool) -> None:
    """Close a listener; ``leaves_socket`` if the file of that name belongs to another one.

    Raises:
        OSError: it cannot be closed.
    """
    if leaves_socket:
        listener._listener._unlink.cancel()  # type: ignore[attr-defined]
        listener._listener._unlink = None  # type: ignore[attr-defined]
    listener.close()


def welcome(connection: Any, key: bytes) -> None:
    """Check on the daemon's side that the peer belongs to this user and knows the key.

    Raises:
        EndpointError: it does not.
    """
    check_peer(connection)
    try:
        mp.deliver_challenge(connection, key)
        mp.answer_challenge(connection, key)
    except (AuthenticationError, EOFError, OSError, ValueError, AssertionError) as error:
        raise EndpointError(f"a peer does not know the key: {error}") from None


def check_peer(connection: Any) -> None:
    """Check that the peer of a socket belongs to this user, where the system tells.

    Raises:
        EndpointError: it does not.
    """
    if not sys.platform.startswith("linux"):
        return
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.getuid():
        raise EndpointError(f"the peer belongs to the user {uid}, not to {os.getuid()}")


class SilenceWatch:
    """Finds out whether a daemon that lets its callers wait still runs: its process may be suspended. Any thread may call.

    The thread that answers them does nothing else, so a daemon that computes or compiles, however long, is not silent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._found: SilentError | None = None

    def check(self) -> None:
        """Return if the daemon answers, or if it has ended, which connections tell by themselves.

        What another thread has found within ``PROBE_SECONDS`` counts as well.

        Raises:
            SilentError: it does not answer in time.
        """
        with self._lock:
            if time.monotonic() - self._looked >= PROBE_SECONDS:
                try:
                    self._found = None
                    listens(self._folder)
                except SilentError as error:
                    self._found = error
                self._looked = time.monotonic()
            if self._found is not None:
                raise SilentError(str(self._found))

"""Reads ordinary files up to a size limit, and writes files atomically."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from staticllm.wire.held_files import patiently

_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _BINARY


def open_regular(path: Path, follow: bool = True) -> BufferedReader:
    """Open a file for reading. Pipes and devices, which could block, are refused; without ``follow`` links as well.

    Raises:
        OSError: it cannot be opened, or is not an ordinary file.
    """
    if not follow and path.is_symlink():
        raise OSError(f"{path.name} is a link, not a file")
    try:
        descriptor = os.open(path, _FLAGS | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    except PermissionError:
        if path.is_dir():  # which Windows does not open
            raise OSError(f"{path.name} is not an ordinary file") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path.name} is not an ordinary file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def remedy_of(error: OSError) -> str:
    """Return what a user can do about a file that cannot be read."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "check the path"
    if isinstance(error, PermissionError):
        return "check its permissions"
    return "check the disk that it is on" if error.errno else "give an ordinary file"


def read_regular(path: Path, limit: int, follow: bool = True) -> bytes:
    """Return all bytes of an ordinary file.

    Raises:
        OSError: it cannot be read, is not an ordinary file, has more than ``limit`` bytes, or memory for it is missing.
    """
    with open_regular(path, follow) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            data = file.read(size + 1) if size <= limit else b""  # Python allocates what is asked for before it reads
            while len(data) > size and len(data) <= limit:  # it grows meanwhile
                size = min(2 * len(data), limit)
                data += file.read(size + 1 - len(data))
        except MemoryError:
            raise OSError(f"{path.name} has {size} bytes, for which there is not enough memory") from None
    if size > limit or len(data) > limit:
        raise OSError(f"{path.name} has {max(size, len(data))} bytes, at most {limit} are read")
    return data


def fill_from(path: Path, buffer: memoryview, follow: bool = True) -> None:
    """Fill a buffer with the bytes of an ordinary file of its size.

    Raises:
        OSError: the file cannot be read, is not an ordinary file, or has another size.
    """
    with open_regular(path, follow) as file:
        size = os.fstat(file.fileno()).st_size
        filled = 0
        while size == len(buffer) > filled and (count := file.readinto(buffer[filled:])):
            filled += count
    if not size == len(buffer) == filled:
        raise OSError(f"{path.name} has {size} bytes, {len(buffer)} were expected: it was changed meanwhile")


@contextmanager
def whole_file(path: Path, prefix: str | None = None, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a temporary file next to ``path``, which is renamed to ``path`` when the block ends without an exception.

    After a full disk, an exception or Ctrl-C the file at ``path`` is unchanged and the temporary file is removed. A killed
    process leaves a file whose name begins with ``prefix`` (by default a dot and the target's name). ``mode`` holds the
    permissions before the umask.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    scratch = path.with_name(f"{prefix or f'.{path.name}.'}{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        patiently(partial(scratch.replace, path))
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def private_folder_in(folder: Path, prefix: str) -> Path:
    """Make a new folder that only this user may enter.

    In a folder of Windows that takes no files, such as ``C:\\Program Files``, ``tempfile.mkdtemp`` does not end for hours: it
    takes the refusal for a name that is in use.

    Raises:
        OSError: it cannot be made.
    """
    made = folder / f"{prefix}{secrets.token_hex(8)}"
    made.mkdir(0o700)
    return made


def refusal_of(folder: Path) -> str:
    """Return why nothing can be made in a folder; "" if it can. It is tried: root may write everywhere, but not to ``/proc``."""
    try:
        private_folder_in(folder, ".staticllm-").rmdir()
    except OSError as error:
        return f"takes no files ({error.strerror or error})"
    return ""


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` through ``whole_file``. A link is followed; a device or a pipe is written to directly.

    Raises:
        OSError: the file cannot be written; the previous file is unchanged.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    with whole_file(target.resolve()) as file:  # the file that a link names is replaced, not the link
        file.write(data)


def user_cache() -> Path:
    """Return the folder for staticllm's own files in the cache of this user; it may not exist.

    It is below ``XDG_CACHE_HOME``, else in ``~/.cache``, on Windows below ``LOCALAPPDATA``, on macOS in ``~/Library/Caches``.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given).absolute() / "staticllm"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    return base.absolute() / "staticllm"

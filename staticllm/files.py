"""Files that somebody else may have written: opened only if they are ordinary files, read only as far as was allowed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path, follow: bool = True) -> BinaryIO:
    """Open a file for reading. A pipe or a device would block for ever, or never end; without ``follow`` a link is refused too.

    Raises:
        OSError: it cannot be opened, or is no ordinary file.
    """
    if not follow and path.is_symlink():
        raise OSError(f"{path.name} is a link, not a file")
    descriptor = os.open(path, _FLAGS | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path.name} is not an ordinary file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, limit: int, follow: bool = True) -> bytes:
    """All bytes of an ordinary file.

    Raises:
        OSError: it cannot be read, is no ordinary file, or has more than ``limit`` bytes.
    """
    with open_regular(path, follow) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise OSError(f"{path.name} has {max(size, len(data))} bytes, at most {limit} are read")
    return data

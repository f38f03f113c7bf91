"""A file that is written whole or not at all: a full disk or Ctrl-C leaves what was there before."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write beside the file and rename; a device or a pipe is written as it is.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    target = target.resolve()  # the file that a link names is replaced, not the link
    scratch = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        scratch.write_bytes(data)
        scratch.replace(target)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise

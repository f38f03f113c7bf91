"""A private temporary folder, which the next process removes if this one is killed."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = "lock"
YOUNG_SECONDS = 60.0
"""A folder of less than this age may not be locked yet."""


class ScratchFolder:
    """A folder in the system's temporary one that only this user may enter, until ``remove``.

    It is locked as long as its process lives. A new one removes those with the same ``prefix`` that nobody has locked.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, prefix: str) -> None:
        remove_left(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = FileLock(self.path / LOCK, thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Remove the folder with all that is in it. A second call does nothing."""
        self._lock.release(force=True)
        shutil.rmtree(self.path, ignore_errors=True)


def remove_left(prefix: str) -> None:
    """Remove the folders of processes that have ended without removing them."""
    oldest = time.time() - YOUNG_SECONDS
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError, Timeout):
            if folder.is_symlink() or folder.stat().st_mtime > oldest or not (folder / LOCK).is_file():
                continue
            with FileLock(folder / LOCK, timeout=0, thread_local=False):
                shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)  # Windows keeps a file that is locked

"""Removes and renames files that other programs hold open: Windows refuses that for as long as they do."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_SECONDS = 2.0
"""How long a file that is held is tried again. Programs that read small files, and scanners for viruses, hold them shorter."""
PAUSE_SECONDS = 0.01
Result = TypeVar("Result")


def patiently(change: Callable[[], Result]) -> Result:
    """Return the result of a change of the file system, such as a rename; on Windows it is tried until nobody holds the file.

    Raises:
        OSError: it is impossible, or the file was held for too long.
    """
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return change()
        except PermissionError:
            if sys.platform != "win32" or time.monotonic() > end:
                raise
            time.sleep(PAUSE_SECONDS)

"""The folder of this user for files that can be made again."""

from __future__ import annotations

import os
import sys
from pathlib import Path


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

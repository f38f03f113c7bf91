"""Whether Windows' Python runs under Wine here, whose gaps are not those of Windows."""

from __future__ import annotations

import ctypes
import sys


def _is_wine() -> bool:
    return sys.platform == "win32" and hasattr(ctypes.WinDLL("ntdll"), "wine_get_version")


IS_WINE = _is_wine()

"""What tells, without reading it, that a file is still the one that was read."""

from __future__ import annotations

import os
import sys

Stamp = tuple[int, int, int, int]
"""Size, time of the content and of the last change in ns, and number in the file system."""


def stamp_of(path: str | os.PathLike[str]) -> Stamp:
    """Return the stamp of a file.

    Programs set the time of the content back (``cp -p``, ``rsync``, archives), but not that of the last change.

    Raises:
        OSError: it is not there.
    """
    found = os.stat(path)  # noqa: PTH116 - paths of other programs may be texts
    return found.st_size, found.st_mtime_ns, _change_time(path, found), found.st_ino


if sys.platform == "win32":
    import ctypes
    import msvcrt

    class _BasicInfo(ctypes.Structure):
        _fields_ = (
            *((name, ctypes.c_int64) for name in ("creation", "access", "write", "change")),
            ("attributes", ctypes.c_uint32),
        )

    _EPOCH = 116_444_736_000_000_000
    """1970 in Windows' count, of 100 ns since 1601."""
    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _kernel.GetFileInformationByHandleEx.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)

    def _change_time(path: str | os.PathLike[str], found: os.stat_result) -> int:
        """Return NTFS's time of change, for ``st_ctime_ns`` is the creation here; 0 where a file system has none."""
        info = _BasicInfo()
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - as above
            handle = msvcrt.get_osfhandle(file.fileno())
            is_known = _kernel.GetFileInformationByHandleEx(handle, 0, ctypes.byref(info), ctypes.sizeof(info))
        return (int(info.change) - _EPOCH) * 100 if is_known and info.change else 0
else:

    def _change_time(path: str | os.PathLike[str], found: os.stat_result) -> int:
        return found.st_ctime_ns

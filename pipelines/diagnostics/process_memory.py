"""Reads the private memory of this process, and how much of an array or of a mapped file is in memory."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

IS_DETAILED = sys.platform == "linux"
"""Whether the system tells which pages of an array or a file are in memory."""
PAGEMAP, SMAPS = Path("/proc/self/pagemap"), Path("/proc/self/smaps")
ENTRY_BYTES = 8
ONLY_HERE = np.uint64(1 << 56)
"""The bit of a page in the page map that says that it is in memory and belongs to this process alone (Linux 4.2)."""


def private_bytes() -> int:
    """Return the bytes of memory that this process alone uses: those that would be free if it ended."""
    return int(psutil.Process().memory_full_info().uss)


def written_bytes(address: int, num_bytes: int) -> int:
    """Return the bytes from ``address`` on whose pages are in memory; 0 where the system does not tell."""
    if not IS_DETAILED or not num_bytes:
        return 0
    first, end = address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE)
    try:
        with PAGEMAP.open("rb") as file:
            file.seek(first * ENTRY_BYTES)
            entries: NDArray[np.uint64] = np.frombuffer(file.read((end - first) * ENTRY_BYTES), np.uint64)
    except OSError:
        return 0
    return min(int(np.count_nonzero(entries & ONLY_HERE)) * mmap.PAGESIZE, num_bytes)


def mapped_bytes(path: Path) -> int:
    """Return the private bytes of a file's mappings that are in memory; 0 where the system does not tell."""
    if not IS_DETAILED:
        return 0
    try:
        lines = SMAPS.read_bytes().splitlines()
    except OSError:
        return 0
    total, is_of_file, name = 0, False, bytes(path.resolve())
    for line in lines:
        first, _, rest = line.partition(b" ")
        if not first.endswith(b":"):
            is_of_file = line.endswith(name)
        elif is_of_file and first in (b"Private_Clean:", b"Private_Dirty:"):
            total += int(rest.split()[0]) << 10
    return total

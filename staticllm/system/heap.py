"""Limits the memory that the C library's heap keeps after blocks were freed.

A program whose calls grow frees small buffers and allocates larger ones. glibc raises the size from which a block is a mapping of
its own (up to 32 MiB) with every such block that is freed, so later ones come from its heaps and leave holes: 100 to 150 MB for a
0.5B model (docs/decisions.md).
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

MMAP_THRESHOLD_OPTION = -3
"""glibc's ``M_MMAP_THRESHOLD``. Setting it also stops glibc from raising it."""
BLOCK_BYTES = 256 << 10


def return_large_blocks() -> bool:
    """Let blocks of at least ``BLOCK_BYTES`` return to the system when they are freed. Return whether that is possible.

    It holds for the whole process until its end. Only for glibc on Linux.
    """
    library = _glibc()
    return library is not None and bool(library.mallopt(MMAP_THRESHOLD_OPTION, BLOCK_BYTES))


def return_free_memory() -> bool:
    """Return the pages that hold no block to the system now; return whether there were any. Only for glibc on Linux.

    Reading a tokenizer leaves about 10 MB of them.
    """
    library = _glibc()
    return library is not None and bool(library.malloc_trim(0))


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = _loaded()
    return library if hasattr(library, "gnu_get_libc_version") else None


@cache  # each CDLL makes a class, which only the garbage collector frees
def _loaded() -> ctypes.CDLL:
    return ctypes.CDLL(None)

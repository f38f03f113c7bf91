"""Shared memory for tensors: sealed memory files on Linux, unlinked files on macOS, tagged mappings on Windows.

The daemon creates a block and hands it over through a connection. It has no name that others could open (on Windows a random
one), and it is gone when both sides have closed it, also after a crash.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

MIN_BLOCK = 1 << 16


def block_size(wanted: int) -> int:
    """Return the size in bytes of a block for ``wanted`` bytes: the next power of two, so that it seldom grows."""
    return max(MIN_BLOCK, 1 << (wanted - 1).bit_length())


class Block:
    """A piece of memory that two processes map.

    ``memory`` is valid until ``close``; arrays that were made over it stay valid, also after that.
    """

    def __init__(self, mapping: mmap.mmap, handle: int | str) -> None:
        self._mapping = mapping
        self._handle = handle
        # NumPy releases the buffer of an array's memory at once and keeps only its owner: that must be an array, which holds
        # the mapping. A mapping that owned the memory itself would be unmapped below the arrays.
        self.memory = np.frombuffer(mapping, np.uint8).data

    def __len__(self) -> int:
        return len(self._mapping)

    @classmethod
    def create(cls, size: int) -> Block:
        """Create a block of at least ``size`` bytes.

        Raises:
            OSError: the system has no memory or no handle for it.
        """
        size = block_size(size)
        if sys.platform == "win32":
            tag = f"staticllm-{secrets.token_hex(16)}"
            return cls(mmap.mmap(-1, size, tagname=tag), tag)
        descriptor = _sealed_file(size) if hasattr(os, "memfd_create") else _unlinked_file(size)
        try:
            return cls(mmap.mmap(descriptor, size), descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def send(self, connection: Any) -> None:
        """Hand the block to the peer of a connection, which calls ``receive``."""
        if isinstance(self._handle, str):
            connection.send_bytes(self._handle.encode())
            return
        from multiprocessing.reduction import send_handle

        send_handle(connection, self._handle, None)

    @classmethod
    def receive(cls, connection: Any, size: int) -> Block:
        """Map the block of ``size`` bytes that the peer of a connection sends.

        Raises:
            OSError: it is smaller, or cannot be mapped.
        """
        if sys.platform == "win32":
            tag = connection.recv_bytes(128).decode("ascii", "replace")
            return cls(mmap.mmap(-1, size, tagname=tag), tag)
        from multiprocessing.reduction import recv_handle

        descriptor = recv_handle(connection)
        try:
            if os.fstat(descriptor).st_size < size:
                raise OSError(f"a block of {os.fstat(descriptor).st_size} bytes was promised to have {size}")
            return cls(mmap.mmap(descriptor, size), descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Unmap the block. Arrays over it keep the mapping until they are gone; nothing new can use it."""
        handle = self._handle
        self._handle = ""
        if isinstance(handle, int):
            os.close(handle)
        with contextlib.suppress(BufferError):  # an array of a caller lies over it; the mapping ends with that array
            self.memory.release()
            self._mapping.close()


def _sealed_file(size: int) -> int:
    """Return a memory file that no process can make shorter: reading it can never raise SIGBUS."""
    import fcntl

    descriptor = os.memfd_create("staticllm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _unlinked_file(size: int) -> int:
    descriptor, path = tempfile.mkstemp("staticllm")
    try:
        Path(path).unlink()
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor

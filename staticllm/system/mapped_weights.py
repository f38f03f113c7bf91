"""Returns the pages of a mapped weights file to the system's page cache while its model is compiled.

OpenVINO maps the weights file and reads all of it once per program, to pack the weights. These pages count as memory of the
process, although few are read again. They are unchanged copies of the file, so the process can give them up at any time.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import openvino as ov

from staticllm.system.threads import LazyThread

PERIOD_SECONDS = 0.1
MADV_DONTNEED = 4
MAPS = Path("/proc/self/maps")


class MappedWeights:
    """The mapping of the file that a model's weights were read from, if there is one.

    It holds a constant of the model, and thereby the mapping: its addresses cannot come to mean other memory meanwhile.
    """

    def __init__(self, model: ov.Model) -> None:
        constants = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
        self._constant = max(constants, key=lambda node: int(node.get_byte_size()), default=None)
        self.addresses = None if self._constant is None else _mapping_at(int(self._constant.data.ctypes.data))

    @property
    def num_bytes(self) -> int:
        """The bytes that are mapped; 0 if none are."""
        return 0 if self.addresses is None else self.addresses[1] - self.addresses[0]

    def release(self) -> bool:
        """Give up the pages that are in memory. Return whether that was possible. Linux only."""
        if self.addresses is None:
            return False
        first, end = self.addresses
        return bool(_madvise()(first, end - first, MADV_DONTNEED) == 0)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give up the pages every ``PERIOD_SECONDS`` while a block runs, and at its end.

        Raises:
            StaticLLMError: no thread can be started.
        """
        if self.addresses is None:
            yield
            return
        is_over = threading.Event()

        def run() -> None:
            while not is_over.wait(PERIOD_SECONDS):
                self.release()

        thread = LazyThread("staticllm-pages")
        try:
            thread.start(run)
            yield
        finally:
            is_over.set()
            thread.join()
            self.release()


def _mapping_at(address: int) -> tuple[int, int] | None:
    """Return the first address and the end of the read-only mapping of a file around ``address``; None if there is none.

    A writable mapping does not count, because its changed pages exist nowhere else.
    """
    if sys.platform != "linux":
        return None
    try:
        lines = MAPS.read_bytes().split(b"\n")
    except OSError:  # not mounted
        return None
    for line in lines:
        addresses, _, rest = line.partition(b" ")
        first, _, end = addresses.partition(b"-")
        if end and int(first, 16) <= address < int(end, 16):
            is_file = b"/" in rest and not rest.endswith(b" (deleted)")
            return (int(first, 16), int(end, 16)) if rest.startswith(b"r-") and is_file else None
    return None


@cache  # each CDLL makes a class, which only the garbage collector frees
def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise

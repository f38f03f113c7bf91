"""Returns the pages of the mapped weights file to the system's page cache while a model is loaded.

OpenVINO maps the weights file and reads all of it once, to pack the weights of each program. The pages that were read stay in
the process, as large as the file, although hardly any is read again. They are unchanged copies of the file, so the process can
give them up at any time: a page that is read again comes from the page cache.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from staticllm.threads import start_thread

PERIOD_SECONDS = 0.1
MADV_DONTNEED = 4


def release_pages(path: Path) -> int:
    """Give up the pages of a file's read-only mappings. Return the number of mappings; 0 where that is not possible.

    Linux only. A writable mapping is left alone, because its changed pages exist nowhere else.
    """
    if sys.platform != "linux":
        return 0
    name, count = str(path.resolve()), 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        addresses, permissions, *_, found = line.split(maxsplit=5) if line.count("/") else (line, "", "")
        if found == name and permissions.startswith("r-"):
            first, end = (int(address, 16) for address in addresses.split("-"))
            count += madvise(first, end - first, MADV_DONTNEED) == 0
    return count


@contextmanager
def released_pages(path: Path) -> Iterator[None]:
    """Give up the pages of a weights file every ``PERIOD_SECONDS`` while a block runs, and at its end.

    Raises:
        StaticLLMError: no thread can be started.
    """
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(PERIOD_SECONDS):
            release_pages(path)

    thread = start_thread(run, "staticllm-pages") if sys.platform == "linux" else None
    try:
        yield
    finally:
        is_over.set()
        if thread is not None:
            thread.join()
        release_pages(path)

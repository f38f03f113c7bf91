"""The private memory of this process: of arrays and of mapped files, page by page."""

import mmap
import sys

import numpy as np
import pytest
from support.wine import IS_WINE

from staticllm.pipelines.diagnostics import process_memory
from staticllm.pipelines.diagnostics.process_memory import mapped_bytes, private_bytes, written_bytes

PAGE = mmap.PAGESIZE
SIZE = 64 << 20
needs_pages = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")


@pytest.mark.skipif(IS_WINE, reason="Wine answers no question about a working set")
def test_private_memory_grows_with_what_is_written():
    before = private_bytes()
    held = np.ones(SIZE // 8)
    assert private_bytes() - before > SIZE * 0.8
    assert held[0] == 1


@needs_pages
def test_only_written_pages_are_in_memory():
    with mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        array = np.frombuffer(memory, np.uint8)
        address = array.ctypes.data
        assert written_bytes(address, SIZE) == 0
        assert array[5 * PAGE] == 0, "a page that was only read is shared with all other zeros"
        assert written_bytes(address, SIZE) == 0
        for page in (3, 4, 9):
            array[page * PAGE] = 1
        assert written_bytes(address, SIZE) == 3 * PAGE
        assert written_bytes(address + 4 * PAGE, 3 * PAGE) == PAGE
        assert written_bytes(address + 3 * PAGE, 100) == 100
        assert written_bytes(address, 0) == 0
        del array


@needs_pages
def test_pages_of_a_file_are_those_that_were_read(tmp_path):
    path = tmp_path / "a file"
    path.write_bytes(bytes(range(256)) * 4096)
    assert mapped_bytes(path) == 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        assert sum(memory[::PAGE]) == 0
        assert mapped_bytes(path) == 1 << 20
        assert mapped_bytes(tmp_path / "another file") == 0
    assert mapped_bytes(path) == 0


def test_a_system_that_does_not_tell_gives_zero(monkeypatch, tmp_path):
    array = np.ones(1024)
    for name in ("PAGEMAP", "SMAPS"):
        monkeypatch.setattr(process_memory, name, tmp_path / "missing")
    assert written_bytes(array.ctypes.data, array.nbytes) == 0
    assert mapped_bytes(tmp_path) == 0
    monkeypatch.setattr(process_memory, "IS_DETAILED", False)
    assert written_bytes(array.ctypes.data, array.nbytes) == 0
    assert mapped_bytes(tmp_path) == 0

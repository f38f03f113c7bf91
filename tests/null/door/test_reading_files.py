"""Files are read with the memory that they need, whatever the limit is, and missing memory is an error that callers expect."""

import sys
import tracemalloc

import pytest

from staticllm.errors import DeviceError, enough_memory
from staticllm.system import files
from staticllm.system.files import fill_from, read_regular


def test_reading_takes_the_size_of_the_file_and_not_the_limit(tmp_path):
    path = tmp_path / "small"
    path.write_bytes(b"x" * 5000)
    tracemalloc.start()
    try:
        assert read_regular(path, 1 << 30) == b"x" * 5000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("growth", [1, 5000, 100_000])
def test_a_file_that_grows_while_it_is_read_is_read_up_to_the_limit(tmp_path, monkeypatch, growth):
    path, limit = tmp_path / "growing", 50_000
    path.write_bytes(b"x" * 1000)

    class Old:
        def __init__(self, found):
            self.st_size, self.st_mode = 1000, found.st_mode

    fstat = files.os.fstat
    monkeypatch.setattr(files.os, "fstat", lambda descriptor: Old(fstat(descriptor)))
    path.write_bytes(b"x" * (1000 + growth))
    if growth < limit:
        assert len(read_regular(path, limit)) == 1000 + growth
    else:
        with pytest.raises(OSError, match="at most 50000"):
            read_regular(path, limit)


def test_missing_memory_is_an_error_of_the_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)

    class Reader:
        def __init__(self, file):
            self._file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

        def fileno(self):
            return self._file.fileno()

        def read(self, size):
            raise MemoryError

    opened = files.open_regular
    monkeypatch.setattr(files, "open_regular", lambda *arguments: Reader(opened(*arguments)))
    with pytest.raises(OSError, match="not enough memory"):
        read_regular(path, 100)


def test_missing_memory_is_one_of_our_errors():
    with pytest.raises(DeviceError, match="memory for the model") as error, enough_memory(DeviceError, "the model"):
        raise MemoryError
    assert "\n" not in str(error.value)


@pytest.mark.skipif(sys.platform != "linux", reason="reads a file that has no size")
def test_a_file_without_a_size_is_read():
    from pathlib import Path

    assert b"VmRSS" in read_regular(Path("/proc/self/status"), 1 << 20)


@pytest.mark.parametrize("length", [0, 1, 100_000])
def test_a_buffer_is_filled_with_a_file_of_its_size(tmp_path, length):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (length // 256) + bytes(length % 256))
    buffer = bytearray(length)
    fill_from(path, memoryview(buffer))
    assert bytes(buffer) == path.read_bytes()
    for other in (length + 1, max(length - 1, 0)):
        if other != length:
            with pytest.raises(OSError, match=f"file has {length} bytes, {other} were expected"):
                fill_from(path, memoryview(bytearray(other)))


def test_a_buffer_is_not_filled_through_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    try:
        (tmp_path / "link").symlink_to(tmp_path / "file")
    except OSError:
        pytest.skip("links cannot be made here")
    with pytest.raises(OSError, match="link"):
        fill_from(tmp_path / "link", memoryview(bytearray(1)), follow=False)

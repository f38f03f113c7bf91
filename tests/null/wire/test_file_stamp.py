"""Tests what tells that a file is still the one that was read."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from staticllm.wire.file_stamp import stamp_of


def rewrite(path, times):
    path.write_bytes(b"12346")
    os.utime(path, ns=times)


def copy_with_times(path, times):
    other = path.with_name("other")
    rewrite(other, times)
    shutil.copy2(other, path)


def rename_over(path, times):
    other = path.with_name("other")
    rewrite(other, times)
    other.replace(path)


def write_a_part(path, times):
    with path.open("r+b") as file:
        file.seek(4)
        file.write(b"6")
    os.utime(path, ns=times)


@pytest.mark.parametrize("change", [rewrite, copy_with_times, rename_over, write_a_part])
def test_a_change_with_the_time_set_back_is_seen(change, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    stat = path.stat()
    before = stamp_of(path)
    assert stamp_of(str(path)) == before
    time.sleep(0.02)  # longer than the steps of the clock that file systems take times from
    change(path, (stat.st_atime_ns, stat.st_mtime_ns))
    after = stamp_of(path)
    assert after[:2] == before[:2]
    assert after != before


def test_reading_changes_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    before = stamp_of(path)
    time.sleep(0.02)
    path.read_bytes()
    assert stamp_of(path) == before


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(OSError, match="missing"):
        stamp_of(tmp_path / "missing")

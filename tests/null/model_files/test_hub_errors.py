"""Tests the lines about a hub: a disk that cannot be written is none of the hub's errors."""

from __future__ import annotations

import errno
import os

import pytest

pytest.importorskip("huggingface_hub")
from staticllm.model_files.hub_errors import what_failed


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EIO])
def test_an_error_of_the_disk_names_the_cache(number):
    """Also of a file that is written already, whose errors have no name of a file."""
    line = what_failed(OSError(number, os.strerror(number)), "owner/name")
    assert line.startswith(f"the cache of Hugging Face cannot be written ({os.strerror(number)}): free space there")


def test_json_that_is_nested_too_deeply_comes_from_no_hub():
    deep = RecursionError("maximum recursion depth exceeded while decoding a JSON array from a unicode string")
    assert "is no Hugging Face hub" in what_failed(deep, "owner/name")
    assert "redirects without end" in what_failed(RecursionError("maximum recursion depth exceeded"), "owner/name")

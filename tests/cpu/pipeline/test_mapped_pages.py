"""The pages of a mapped weights file, which are given up while a model is loaded."""

from __future__ import annotations

import mmap
import sys
import threading
from pathlib import Path

import pytest

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.pipelines.model_loader.mapped_pages import release_pages, released_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the pages")
SIZE = 8 << 20


def bytes_in_memory(path):
    """Return the bytes of the file's mappings that are in memory."""
    total, is_of_file = 0, False
    with Path("/proc/self/smaps").open(encoding="utf-8") as lines:
        for line in lines:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                is_of_file = line.rstrip().endswith(str(path))
            elif is_of_file and first == "Rss:":
                total += int(line.split()[1]) << 10
    return total


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "a model's weights.bin"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    return path


def test_released_pages_are_read_again_from_the_file(weights):
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapping:
        assert sum(mapping[:: mmap.PAGESIZE]) == 0
        assert bytes_in_memory(weights) == SIZE
        assert release_pages(weights) == 1
        assert bytes_in_memory(weights) == 0
        assert mapping[:512] == bytes(range(256)) * 2


def test_a_writable_mapping_keeps_its_changes(weights):
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, protection) as mapping:
        mapping[100] = 7
        assert release_pages(weights) == 0
        assert mapping[100] == 7


def test_the_thread_ends_with_the_block_even_if_it_raises(weights):
    with pytest.raises(KeyError), released_pages(weights):
        assert "staticllm-pages" in {thread.name for thread in threading.enumerate()}
        raise KeyError
    assert "staticllm-pages" not in {thread.name for thread in threading.enumerate()}


def test_a_loaded_model_keeps_no_pages_of_its_weights():
    weights = demo_model_path() / "openvino_model.bin"
    with StaticLLMPipeline(demo_model_path(), "CPU", MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=64) as pipe:
        assert pipe.wait_until_complete()
        assert bytes_in_memory(weights.resolve()) < weights.stat().st_size / 4
        assert pipe.generate("Once upon a time", max_new_tokens=3)

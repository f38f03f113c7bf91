"""The pages of a mapped weights file, which are given up while a model is loaded."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.devices import get_core
from staticllm.system import mapped_weights
from staticllm.system.mapped_weights import MappedWeights

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
def folder(tmp_path):
    """A model with weights of 8 MiB in a file."""
    value = ops.parameter([1, 1024], np.float32)
    product = ops.matmul(value, ops.constant(np.ones((2048, 1024), np.float32)), False, True)
    path = tmp_path / "a model's folder"
    path.mkdir()
    ov.save_model(ov.Model([ops.result(product)], [value]), path / "model.xml", compress_to_fp16=False)
    return path


def read(folder):
    model = get_core().read_model(folder / "model.xml")
    (constant,) = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    return model, constant.data


def test_released_pages_are_read_again_from_the_file(folder):
    model, values = read(folder)
    assert values.sum() == SIZE / 4
    assert bytes_in_memory(folder / "model.bin") >= SIZE
    assert MappedWeights(model).release()
    assert bytes_in_memory(folder / "model.bin") == 0
    assert values.sum() == SIZE / 4


def test_the_mapping_outlives_the_model_while_it_is_held(folder):
    model, values = read(folder)
    weights = MappedWeights(model)
    del model, values
    gc.collect()
    assert weights.release(), "the addresses are no longer those of the file"
    first, end = weights.addresses
    assert end - first >= SIZE
    (line,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(f"{first:x}-")]
    assert line.endswith("model.bin")


def test_weights_in_memory_are_left_alone(folder):
    value = ops.parameter([1, 4], np.float32)
    model = ov.Model([ops.result(ops.add(value, np.ones((1, 4), np.float32)))], [value])
    weights = MappedWeights(model)
    assert weights.addresses is None
    assert not weights.release()
    with weights.released():
        assert "staticllm-pages" not in {thread.name for thread in threading.enumerate()}


def test_nothing_is_released_where_mappings_cannot_be_listed(folder, monkeypatch):
    monkeypatch.setattr(mapped_weights, "MAPS", folder / "missing")
    assert MappedWeights(read(folder)[0]).addresses is None


def test_the_thread_ends_with_the_block_even_if_it_raises(folder):
    with pytest.raises(KeyError), MappedWeights(read(folder)[0]).released():
        assert "staticllm-pages" in {thread.name for thread in threading.enumerate()}
        raise KeyError
    assert "staticllm-pages" not in {thread.name for thread in threading.enumerate()}


def test_a_loaded_model_keeps_no_pages_of_its_weights():
    weights = (demo_model_path() / "openvino_model.bin").resolve()
    gc.collect()
    before = bytes_in_memory(weights)  # of pipelines that other tests left to the garbage collector
    with StaticLLMPipeline(demo_model_path(), "CPU", MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=64) as pipe:
        assert pipe.wait_until_complete()
        assert bytes_in_memory(weights) - before < weights.stat().st_size / 4
        assert pipe.generate("Once upon a time", max_new_tokens=3)

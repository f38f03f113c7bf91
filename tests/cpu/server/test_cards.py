"""Tests the cards of models: parameters, quantization and format, of GGUF files as the file has them."""

from __future__ import annotations

import httpx
import pytest
from support.models import gguf_files
from support.server.served import serving

from staticllm.model_dir import demo_model_path
from staticllm.model_files.gguf_header import GGUFHeader, GGUFTensor
from staticllm.server.catalog import ModelFacts, facts_of
from staticllm.server.models.served import demo_spec, model_spec

gguf = pytest.importorskip("gguf")


def a_file(folder, quant):
    return gguf_files.write(demo_model_path(), folder / f"demo-{quant}.gguf", "demo", quant).path


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_K"])
def test_the_card_of_a_gguf_file_counts_its_weights(quant, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = a_file(tmp_path, quant)
    facts = facts_of(model_spec(str(path)))
    assert facts.num_parameters == sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(path).tensors)
    assert facts.format == "gguf"
    assert facts.level == quant
    path.unlink()  # what was made of it is still there, and described by itself
    facts_of.__globals__["_read"].cache_clear()
    assert facts_of(model_spec(str(demo_model_path()))).format == "openvino"


def test_a_card_over_http_is_that_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = a_file(tmp_path, "Q8_0")
    with serving([model_spec(f"own={path}")], is_lazy=True) as served:
        (card,) = httpx.get(served.url + "/api/tags", timeout=60).json()["models"]
        (listed,) = httpx.get(served.url + "/api/v0/models", timeout=60).json()["data"]
    assert card["details"]["format"] == "gguf"
    assert card["details"]["quantization_level"] == listed["quantization"] == "Q8_0"


def test_numbers_that_scale_weights_are_no_parameters():
    facts = facts_of(demo_spec())
    assert facts.format == "openvino"
    assert facts.level == "I8"


def test_sizes_are_written_as_people_write_them():
    sizes = {494_032_768: "494M", 7_615_616_512: "7.6B", 134_515_008: "135M", 1_235_814_400: "1.2B", 12: "12"}
    for number, text in sizes.items():
        assert ModelFacts(number, "i8", 0, "", 0.0, None, "").size_label == text


def test_the_type_of_a_file_is_its_own_word_or_that_of_most_weights(tmp_path):
    tensors = (GGUFTensor("a", (256, 8), "Q4_K", 0, 0), GGUFTensor("b", (256, 2), "Q6_K", 0, 0))
    for metadata, expected in (
        ({"general.file_type": 15}, "Q4_K_M"),
        ({}, "Q4_K"),
        ({"general.file_type": 9999}, "Q4_K"),
    ):
        header = GGUFHeader(tmp_path, metadata, tensors, 0)
        assert (header.file_type, header.num_parameters) == (expected, 2560)

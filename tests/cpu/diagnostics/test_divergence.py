"""Tests the measured divergence of settings from the original in f32."""

from __future__ import annotations

import numpy as np
import pytest
from support.models import gguf_files

from staticllm.config import StaticLLMConfig
from staticllm.errors import ConfigError
from staticllm.pipelines.diagnostics import divergence
from staticllm.pipelines.diagnostics.divergence import (
    MOST_DIVERGENCE,
    compare,
    kl_divergence,
    measure_divergence,
    reference_texts,
)
from staticllm.pipelines.diagnostics.reference import StatefulReference

SMALL = {"max_prompt_len": 64, "min_response_len": 64, "max_num_seqs": 1}


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch):
    monkeypatch.setattr(divergence, "TEXTS", 3)
    monkeypatch.setattr(divergence, "TEXT_LEN", 20)


def test_the_divergence_of_two_coins():
    fair, biased = np.log([[0.5, 0.5]]).astype(np.float32), np.log([[0.9, 0.1]]).astype(np.float32)
    assert kl_divergence(fair, biased) == pytest.approx([np.log(0.5) - 0.5 * np.log(0.09)])
    assert kl_divergence(fair + 100, fair) == pytest.approx([0.0], abs=1e-6), "an offset of logits changes nothing"


def test_a_comparison_counts_places_and_applies_the_limit():
    random = np.random.default_rng(0)
    expected = [random.standard_normal((5, 7)).astype(np.float32), random.standard_normal((3, 7)).astype(np.float32)]
    same = compare("exact", expected, expected)
    assert (same.tokens, same.mean, same.agreement, same.is_within) == (8, 0.0, 1.0, True)
    other = [lines.copy() for lines in expected]
    other[1][0, other[1][0].argmin()] += 20
    found = compare("wrong once", expected, other)
    assert found.agreement == 7 / 8
    assert found.largest == pytest.approx(8 * found.mean)
    assert found.error == pytest.approx(found.largest / 3 / 2), "the means of the texts are 0 and a third of it"
    assert not found.is_within
    assert found.mean > MOST_DIVERGENCE


def test_texts_are_written_by_the_model_and_the_same_each_time(model_path):
    texts, logits = reference_texts(model_path("llama"))
    again, _ = reference_texts(model_path("llama"))
    assert texts == again
    assert len(set(map(tuple, texts))) == divergence.TEXTS
    reference = StatefulReference(model_path("llama"))
    for text, expected in zip(texts, logits, strict=True):
        reference.reset()
        assert np.abs(reference.logits(text) - expected).max() <= 1e-3 * np.ptp(expected)


@pytest.mark.slow
def test_f32_is_the_original_and_8_bits_of_slots_are_not(model_path):
    path = model_path("demo")
    config = StaticLLMConfig(**SMALL, kv_cache_precision="f32")  # a text may run in two calls, which costs decide
    exact = {each.settings: each for each in measure_divergence(path, "CPU", config)}
    assert exact["f32, no quantization"].mean < 1e-9
    assert {part for each in exact.values() for part in each.chosen_for} >= {"prefill", "generate"}
    (genai,) = (each for each in exact.values() if "plugin's defaults" in each.settings)
    assert genai.mean > 1e-7, "its keys and values have 8 bits"
    rounded = StaticLLMConfig(**SMALL, kv_cache_precision="u8")
    (ours,) = (each for each in measure_divergence(path, "CPU", rounded) if each.settings == "f32, no quantization")
    assert 1e-7 < ours.mean <= MOST_DIVERGENCE


@pytest.mark.slow
def test_a_given_text_is_read_in_passages_and_has_the_perplexity_of_the_original(model_path, monkeypatch):
    monkeypatch.setattr(divergence, "PASSAGE_LEN", 40)  # the last call has fewer tokens than the others
    monkeypatch.setattr(divergence, "MOST_PASSAGES", 2)
    path = model_path("demo")
    text = "The fox sat on the hill and looked at the moon. " * 20
    parts = divergence.passages(path, text)
    assert [len(part) for part in parts] == [40, 40]
    reference = StatefulReference(path)
    losses = []
    for part in parts:
        reference.reset()
        logits = reference.logits(part).astype(np.float64)
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        losses += [-np.log(line[token]) for line, token in zip(shares, part[1:], strict=False)]
    config = StaticLLMConfig(**SMALL, kv_cache_precision="f32")
    found = next(measure_divergence(path, "CPU", config, text=text))
    assert found.exact_perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    assert found.perplexity == pytest.approx(found.exact_perplexity, rel=1e-4)
    assert found.tokens == 80
    with pytest.raises(ConfigError, match="too short: at least 39 are needed"):
        next(measure_divergence(path, "CPU", config, text="The fox."))


def test_a_gguf_file_is_measured_as_it_is(model_path, tmp_path):
    gguf_files.write(model_path("llama"), tmp_path / "tiny.Q8_0.gguf", "llama", "Q8_0")
    (found, *_) = measure_divergence(tmp_path / "tiny.Q8_0.gguf", "CPU", StaticLLMConfig(**SMALL))
    assert np.isfinite(found.mean)


def test_only_the_cpu_is_measured(model_path):
    with pytest.raises(ConfigError, match="use --device CPU"):
        next(measure_divergence(model_path("llama"), "NPU", StaticLLMConfig()))

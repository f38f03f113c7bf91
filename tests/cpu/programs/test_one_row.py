"""A static program of one row computes what a program of two rows does, in the processor's own precision too."""

from __future__ import annotations

import os

import numpy as np
import pytest

from staticllm import StaticLLMPipeline
from staticllm.config import StaticLLMConfig
from staticllm.kvcache.step import Segment
from staticllm.pipelines.loading.load import load

PROMPT = [5, 9, 12, 7, 30, 41, 8, 22]


@pytest.mark.parametrize("programs", ["separate", "blocks", "shared"])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_single_rows_in_any_precision_are_those_of_the_original(model_path, programs, precision):
    expected = logits_of(model_path, "shared", "f32")
    found = logits_of(model_path, programs, precision)
    assert np.isfinite(found).all()
    tolerance = 1e-4 if precision == "f32" else 0.05
    np.testing.assert_allclose(found, expected, atol=tolerance * np.ptp(expected))


def logits_of(model_path, programs, precision):
    """Return the logits of tokens that are fed one by one, ``[tokens, vocab]``."""
    config = StaticLLMConfig(
        max_prompt_len=32, min_response_len=32, max_num_seqs=1, programs=programs, measure_costs=False,
        device_properties={"INFERENCE_PRECISION_HINT": precision},
    )  # fmt: skip
    runner = load(model_path("demo"), "CPU", config).runner
    sequence = runner.cache.open()
    found = [runner.step([Segment(sequence, np.array([token]))])[0].copy() for token in PROMPT]
    return np.stack(found)


@pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="the plugin has no such products under a limited ISA")
def test_a_text_in_bf16_is_that_in_f32(model_path):
    texts = []
    for precision in ("f32", "bf16"):
        with StaticLLMPipeline(
            model_path("demo"), "CPU", PROGRAMS="separate", INFERENCE_PRECISION_HINT=precision, MAX_PROMPT_LEN=32,
            MIN_RESPONSE_LEN=32, MAX_NUM_SEQS=1, DYNAMIC_QUANTIZATION_GROUP_SIZE=0,
        ) as pipe:  # fmt: skip
            texts.append(pipe.generate("Tell me a story about a fox.", max_new_tokens=6))
    assert texts[0] == texts[1]

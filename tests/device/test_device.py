"""Tests the device named by ``STATICLLM_DEVICE``, as in ``STATICLLM_DEVICE=NPU python scripts/test.py tests/device``."""

from __future__ import annotations

import os

import numpy as np
import pytest

from staticllm import StaticLLMPipeline
from staticllm.pipelines.diagnostics.reference import StatefulReference

DEVICE = os.environ.get("STATICLLM_DEVICE", "")


@pytest.mark.skipif(not DEVICE, reason="STATICLLM_DEVICE names no device")
@pytest.mark.parametrize("mode", ["separate", "shared"])
def test_the_device_generates_the_tokens_of_the_original(mode, model_path, prompt_of):
    """An accelerator may compute in f16, so only the first tokens must agree; near-ties may differ later."""
    reference = StatefulReference(model_path("demo"))
    pipe = StaticLLMPipeline(model_path("demo"), DEVICE, PROGRAMS=mode, MAX_PROMPT_LEN=256)
    tokenizer = pipe.get_tokenizer()
    for prompt in ("What is an NPU?", "Tell me a story about a fox."):
        ids = tokenizer.encode(prompt).input_ids.data[0].tolist()
        answer = pipe.generate(np.array(ids), max_new_tokens=16, ignore_eos=True)
        assert answer.tokens[0] == reference.greedy(ids, 16)

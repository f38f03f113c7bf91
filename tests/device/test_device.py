"""Tests the device named by ``STATICLLM_DEVICE``, as in ``STATICLLM_DEVICE=NPU python scripts/test.py tests/device``."""

from __future__ import annotations

import os

import numpy as np
import pytest

from staticllm import StaticLLMPipeline
from staticllm.pipelines.diagnostics.reference import StatefulReference

DEVICE = os.environ.get("STATICLLM_DEVICE", "")


@pytest.mark.skipif(not DEVICE, reason="STATICLLM_DEVICE names no device")
@pytest.mark.parametrize("mode", ["blocks", "separate", "shared"])
def test_the_device_generates_the_tokens_of_the_original(mode, model_path, prompt_of):
    """An accelerator may compute in f16, so only the first tokens must agree; near-ties may differ later."""
    reference = StatefulReference(model_path("demo"))
    pipe = StaticLLMPipeline(model_path("demo"), DEVICE, PROGRAMS=mode, MAX_PROMPT_LEN=256)
    tokenizer = pipe.get_tokenizer()
    for prompt in ("What is an NPU?", "Tell me a story about a fox."):
        ids = tokenizer.encode(prompt).input_ids.data[0].tolist()
        answer = pipe.generate(np.array(ids), max_new_tokens=16, ignore_eos=True)
        assert answer.tokens[0] == reference.greedy(ids, 16)


@pytest.mark.skipif(not DEVICE, reason="STATICLLM_DEVICE names no device")
def test_a_device_reads_weights_where_they_are(model_path, monkeypatch):
    """If the plugin copied the weights in each call, memory of the device's own would be no faster than any other.

    This is the one risk of programs in blocks that no compiler shows. Run it with ``-s``: it prints the milliseconds of a decode
    step with the weights in memory of the device, and in other memory, and what a call costs beside its work.
    """
    from staticllm.compiler_passes.compiling import device_memory
    from staticllm.devices import get_core

    if device_memory.device_allocator(get_core(), DEVICE) is None:
        pytest.skip(f"{DEVICE} has no memory of its own that the host can write")
    own = step_seconds(model_path("demo"))
    monkeypatch.setattr(device_memory, "_DEVICES", frozenset())
    other = step_seconds(model_path("demo"))
    print(
        f"\na decode step takes {1e3 * own:.2f} ms with weights in {DEVICE} memory, {1e3 * other:.2f} ms in other memory"
    )
    assert own <= 1.1 * other


def step_seconds(path) -> float:
    """Return the median seconds of a decode step in blocks."""
    with StaticLLMPipeline(path, DEVICE, PROGRAMS="blocks", MAX_PROMPT_LEN=256) as pipe:
        pipe.wait_until_complete()
        pipe.generate(np.arange(10, 40), max_new_tokens=64, ignore_eos=True)
        program = pipe.engine.run_between_steps(lambda: min(pipe.engine.runner.programs.bound, key=lambda p: p.variant))
        return float(np.median(pipe.engine.run_between_steps(lambda: [program.run() for _ in range(100)])))

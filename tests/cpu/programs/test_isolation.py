"""Tests that at one program shape, the logits of a sequence are bit-identical whatever the other rows hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from staticllm.compiler_passes.compiling.compile import compile_all
from staticllm.compiler_passes.compiling.dry_run import random_feeds, run_apart
from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.kvcache.step import Segment
from staticllm.pipelines.loading.decoder_kind import prepare
from staticllm.pipelines.programs.warm_up import make_runner

pytestmark = pytest.mark.usefixtures("shared_programs")

PACKED = Variant(8, 256, 8)
VARIANTS = (PACKED, Variant(64, 0), Variant(64, 256), Variant(64, 256, 8), Variant(1, 256))


def runner_of(path, mode, precision):
    config = StaticLLMConfig(
        max_prompt_len=200,
        min_response_len=56,
        kv_slots=256,
        programs=mode,
        device_properties={"INFERENCE_PRECISION_HINT": precision},
    )
    plan = prepare(path, "CPU", config)
    return make_runner(compile_all(replace(plan, variants=VARIANTS)))


def segment(sequence, token):
    return Segment(sequence, np.array([token], np.int64))


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("mode", ["separate", "blocks", "shared"])
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "gpt2", "bloom"))]
)
def test_logits_do_not_depend_on_other_sequences_of_the_step(name, mode, precision, zoo, prompt_of):
    runner = runner_of(zoo / name, mode, precision)
    mine = runner.cache.open()
    runner.prefill(mine, prompt_of(40))
    others = [runner.cache.open() for _ in range(7)]
    for index, other in enumerate(others):
        runner.prefill(other, prompt_of(3 + 5 * index, seed=9))
    seen = set()
    for count in (0, 1, 3, 7):
        forks = [runner.cache.fork(sequence, len(sequence)) for sequence in (mine, *others[:count])]
        segments = [segment(fork, 100 + 11 * index) for index, fork in enumerate(forks)]
        seen.add(runner.run(PACKED, segments).segments[0].logits.tobytes())
        for fork in forks:
            runner.cache.close(fork)
    assert len(seen) == 1


@pytest.mark.parametrize("mode", ["separate", "blocks", "shared"])
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "gpt2", "bloom"))]
)
def test_packed_decoding_gives_each_sequence_its_own_tokens(name, mode, zoo, prompt_of, original):
    runner, reference = runner_of(zoo / name, mode, "f32"), original(zoo / name)
    prompts = [prompt_of(length) for length in (5, 23, 40, 1)]
    sequences, tokens = [runner.cache.open() for _ in prompts], []
    for sequence, prompt in zip(sequences, prompts, strict=True):
        tokens.append([int(runner.prefill(sequence, prompt).argmax())])
    for _ in range(23):
        segments = [segment(sequence, answer[-1]) for sequence, answer in zip(sequences, tokens, strict=True)]
        for answer, logits in zip(tokens, runner.step(segments), strict=True):
            answer.append(int(logits.argmax()))
    assert tokens == [reference.greedy(prompt, 24) for prompt in prompts]


def test_decoding_and_prefill_can_share_a_step(zoo, prompt_of, original):
    runner, reference = runner_of(zoo / "llama", "shared", "f32"), original(zoo / "llama")
    first, second, prompt = runner.cache.open(), runner.cache.open(), prompt_of(30)
    answer = [int(runner.prefill(first, prompt_of(12)).argmax())]
    for start in range(0, 30, 7):
        chunk = Segment(second, np.array(prompt[start : start + 7], np.int64))
        logits = runner.step([segment(first, answer[-1]), chunk])
        answer.append(int(logits[0].argmax()))
    assert answer == reference.greedy(prompt_of(12), 6)
    assert [int(logits[1].argmax())] == reference.greedy(prompt, 1)


@pytest.mark.parametrize("mode", ["separate", "blocks", "shared"])
def test_a_program_may_have_logits_after_several_rows_of_a_sequence(mode, zoo):
    config = StaticLLMConfig(programs=mode, device_properties={"INFERENCE_PRECISION_HINT": "f32"})
    plan = prepare(zoo / "llama", "CPU", config)
    last, several = Variant(8, 256), Variant(8, 256, extra_logits=4)
    compiled = compile_all(plan.restricted((last, several))).compiled
    one, five = (
        run_apart(compiled[found], random_feeds(compiled[found], found))["logits"] for found in (last, several)
    )
    assert one.shape == (1, 1, plan.lowered.shape.vocab_size)
    assert five.shape == (1, 5, plan.lowered.shape.vocab_size)
    np.testing.assert_allclose(five[:, -1:], one, atol=1e-4 * np.ptp(one))

"""Tests decode steps between the blocks of a prompt's call on real programs: tokens are those of the original, in f32."""

from __future__ import annotations

import numpy as np
import pytest
from support.helpers import EXACT

from staticllm import StaticLLMPipeline
from staticllm.pipelines.scheduling.interface import Plan

pytestmark = pytest.mark.usefixtures("shared_programs")
SLOW = pytest.mark.slow
MODELS = ["llama", "gemma2", *(pytest.param(name, marks=SLOW) for name in ("gpt_neox", "bloom", "phi3", "qwen2_moe"))]


class Eager:
    """Runs a chunk of a prompt and a decode step in turns, and lets all running requests decode between any two blocks."""

    def __init__(self, chunk):
        self.chunk, self.has_prefilled, self.kv_lens = chunk, False, set()

    def plan(self, view):
        prompts = [*view.prefilling, *view.waiting]
        self.has_prefilled = bool(prompts) and not (self.has_prefilled and view.running)
        if self.has_prefilled and prompts[0].num_left + len(view.running) <= view.free_slots:
            return Plan(prefill=((prompts[0].id, min(self.chunk, prompts[0].num_left)),))
        places = view.swapped[: view.free_seqs]
        return Plan(decode=tuple(r.id for r in (*view.running, *places)), swap_in=tuple(r.id for r in places))

    def between_blocks(self, view, call):
        count = min(call.max_decoding, view.free_slots)
        self.kv_lens.add(call.variant.kv_len)
        return Plan(decode=tuple(request.id for request in view.running[:count])) if count else None


def answers_of(pipe, prompts, num_new):
    """Return the tokens after prompts that arrive at once."""

    def submit():
        return [pipe.submit(np.array([prompt]), max_new_tokens=num_new, ignore_eos=True) for prompt in prompts]

    return [list(handle.outputs()[0].tokens) for handle in pipe.engine.run_between_steps(submit)]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_original(name, model_path, original, prompt_of):
    scheduler = Eager(32)
    lengths = {"MAX_PROMPT_LEN": 96, "MIN_RESPONSE_LEN": 64, "PREFILL_ROWS": [16, 32]}
    sizes = {"PROGRAMS": "blocks", "MAX_NUM_SEQS": 4, "KV_SLOTS": 400, **lengths}
    with StaticLLMPipeline(model_path(name), "CPU", scheduler=scheduler, **EXACT, **sizes) as pipe:
        prompts = [
            prompt_of(length)[::step] for length, step in ((20, 1), (33, 1), (90, 1), (64, -1), (40, -1), (96, -1))
        ]
        answers = answers_of(pipe, prompts, 40)
        stats = pipe.stats()
    reference = original(model_path(name))
    assert answers == [reference.greedy(prompt, 40) for prompt in prompts]
    assert stats.num_inserted >= 10
    assert scheduler.kv_lens - {0}, "a call that read slots was interrupted"


def test_the_ladder_for_blocks_gives_the_tokens_of_the_original(model_path, original, prompt_of):
    """Its rows are multiples of 16, and single rows have another KV length than the others."""
    scheduler = Eager(64)
    sizes = {"PROGRAMS": "blocks", "MAX_PROMPT_LEN": 150, "MIN_RESPONSE_LEN": 50}
    with StaticLLMPipeline(model_path("qwen3"), "CPU", scheduler=scheduler, **sizes, **EXACT) as pipe:
        prompts = [prompt_of(length)[::step] for length, step in ((20, 1), (150, 1), (130, -1))]
        answers = answers_of(pipe, prompts, 30)
        stats = pipe.stats()
    reference = original(model_path("qwen3"))
    assert answers == [reference.greedy(prompt, 30) for prompt in prompts]
    assert stats.num_inserted >= 4

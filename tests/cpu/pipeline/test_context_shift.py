"""Tests conversations whose keys are moved to other positions instead of being computed again."""

from __future__ import annotations

import numpy as np
import pytest
from support.helpers import EXACT, tokens_of

from staticllm import StaticLLMPipeline
from staticllm.kvcache.groups import place_of
from staticllm.pipelines.engine.overflow import SINKS

pytestmark = pytest.mark.usefixtures("shared_programs")

SMALL = {"MAX_PROMPT_LEN": 96, "MIN_RESPONSE_LEN": 4, **EXACT}


def shifted_sequence(pipe, prompt):
    """Return a copy of a conversation whose keys were moved, while its answer goes on."""
    found, manager = [], pipe.engine.core.device.kv_manager

    def look():
        for state in manager.states.values():
            if state.kv.is_shifted and not found:
                found.append(manager.cache.copy_out(state.kv.sequence))

    pipe.generate(
        np.array([prompt]),
        streamer=lambda _: pipe.engine.run_between_steps(look),
        max_new_tokens=40,
        ignore_eos=True,
        overflow="context_shift",
    )
    return found[0]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "phi3"])
def test_moved_keys_are_those_of_their_new_positions(name, zoo, prompt_of):
    """The first layer's keys do not depend on other tokens: they must equal those of a prompt without the removed tokens."""
    prompt = prompt_of(90)
    with StaticLLMPipeline(zoo / name, "CPU", **SMALL) as pipe:
        assert pipe.engine.run_between_steps(lambda: pipe.engine.runner.rotations) is not None
        moved = shifted_sequence(pipe, prompt)
        tokens = list(moved.tokens)
        assert tokens[:SINKS] == prompt[:SINKS]
        assert tokens[SINKS] != prompt[SINKS]
        tokens_of(pipe, tokens, 3)
        manager = pipe.engine.core.device.kv_manager
        exact = pipe.engine.run_between_steps(lambda: manager.prefix.find(tokens, manager.sequences()))
        states, groups = manager.cache.kv_states, manager.cache.arena.groups
    for index, state in enumerate(states):
        if state.layer != min(state.layer for state in states):
            continue
        number, line = place_of(groups, index)
        one, other = moved.kv[number][line], exact.kv[number][line][:, : len(tokens)]
        np.testing.assert_allclose(one, other, atol=2e-3 * np.abs(other).max())
        assert np.abs(one - exact.kv[number][line][:, [0]]).max() > 0.1  # the slots differ from each other


def test_nothing_is_computed_again(zoo, prompt_of):
    with StaticLLMPipeline(zoo / "llama", "CPU", **SMALL) as pipe:
        tokens_of(pipe, prompt_of(90), 1)
        pipe.engine.run_between_steps(lambda: pipe.engine.runner.rotations)
        with pipe.engine.record() as trace:
            assert len(tokens_of(pipe, prompt_of(80), 200, overflow="context_shift")) == 200
        counts = [count for step in trace.steps for _, count in step.prefill]
        assert sum(count for count in counts if count > 1) <= 80
        with pipe.engine.record() as trace:
            tokens_of(pipe, prompt_of(80), 200, overflow="shift")
        assert sum(count for step in trace.steps for _, count in step.prefill) > 200


def test_slots_with_moved_keys_are_not_reused(zoo, prompt_of):
    with StaticLLMPipeline(zoo / "llama", "CPU", **SMALL) as pipe:
        prompt = prompt_of(90)
        tokens = tokens_of(pipe, prompt, 30, overflow="context_shift")
        full = [*prompt, *tokens]
        kept = [*full[:SINKS], *full[-40:]]
        expected = StaticLLMPipeline(zoo / "llama", "CPU", **SMALL, PREFIX_CACHING=False)
        assert tokens_of(pipe, kept, 8) == tokens_of(expected, kept, 8)
        assert pipe.generate(np.array(kept), max_new_tokens=2).perf_metrics.get_num_cached_tokens() < len(kept)
        expected.close()


def test_models_without_rotary_keys_compute_again(zoo, prompt_of):
    with StaticLLMPipeline(zoo / "gpt2", "CPU", **SMALL) as pipe:
        assert pipe.engine.run_between_steps(lambda: pipe.engine.runner.rotations) is None
        prompt = prompt_of(90)
        assert tokens_of(pipe, prompt, 30, overflow="context_shift") == tokens_of(pipe, prompt, 30, overflow="shift")


def test_requests_beside_a_shift_keep_their_tokens(zoo, prompt_of):
    with StaticLLMPipeline(zoo / "llama", "CPU", **SMALL) as pipe:
        prompts = [prompt_of(60), prompt_of(40)]
        alone = [tokens_of(pipe, prompt, 30) for prompt in prompts]
        shifting = pipe.submit(np.array(prompt_of(90)), max_new_tokens=150, ignore_eos=True, overflow="context_shift")
        handles = [pipe.submit(np.array(prompt), max_new_tokens=30, ignore_eos=True) for prompt in prompts]
        assert [list(handle.result().tokens[0]) for handle in handles] == alone
        assert len(shifting.result().tokens[0]) == 150


@pytest.mark.parametrize("slots", [128, 160, 200])
def test_answers_that_share_a_prompt_shift_with_few_slots(slots, zoo, prompt_of):
    """Slots that are shared are not freed by a shift, so the moved keys need others."""
    with StaticLLMPipeline(zoo / "llama", "CPU", **SMALL, MAX_NUM_SEQS=4, KV_SLOTS=slots) as pipe:
        other = pipe.submit(np.array(prompt_of(30)), max_new_tokens=60, ignore_eos=True)
        results = pipe.generate(
            np.array(prompt_of(90)),
            max_new_tokens=60,
            ignore_eos=True,
            overflow="context_shift",
            num_return_sequences=3,
            do_sample=True,
        )
        assert [len(tokens) for tokens in results.tokens] == [60] * 3
        assert len(other.result().tokens[0]) == 60

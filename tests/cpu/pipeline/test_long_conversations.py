"""Tests conversations that exceed ``max_seq_len``, and conversations that outlive their process."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
from support.helpers import EXACT, tokens_of

from staticllm import SnapshotError, StaticLLMPipeline

pytestmark = pytest.mark.usefixtures("shared_programs")

SMALL = {"MAX_PROMPT_LEN": 96, "MIN_RESPONSE_LEN": 64, **EXACT}


@pytest.mark.parametrize("rule", ["truncate_middle", "shift"])
def test_long_prompts_and_long_answers_continue(zoo, prompt_of, rule):
    with StaticLLMPipeline(zoo / "llama", "CPU", **SMALL) as pipe:
        result = pipe.generate(np.array(prompt_of(200)), max_new_tokens=150, ignore_eos=True, overflow=rule)
        assert len(result.tokens[0]) == 150
        assert result.finish_reasons == ["length"]
        assert result.perf_metrics.get_num_input_tokens() == 96


def test_an_answer_after_a_shift_equals_that_of_the_remaining_tokens(zoo, prompt_of):
    prompt = prompt_of(90)
    with StaticLLMPipeline(zoo / "llama", "CPU", MAX_PROMPT_LEN=96, MIN_RESPONSE_LEN=4, **EXACT) as pipe:
        tokens = tokens_of(pipe, prompt, 20, overflow="shift")
        full = [*prompt, *tokens[:11]]  # one token more than max_seq_len
        kept = [*full[:4], *full[4 - 50 :]]
        assert tokens[11:] == tokens_of(pipe, kept, 9)


def test_without_lengths_a_prompt_that_is_shortened_leaves_room_for_an_answer(zoo):
    with StaticLLMPipeline(zoo / "llama", "CPU", **EXACT) as pipe:
        longest = pipe.config.max_seq_len
        prompt = np.arange(longest + 50) % 900 + 8
        result = pipe.generate(prompt, max_new_tokens=2, ignore_eos=True, overflow="context_shift")
        assert result.perf_metrics.get_num_input_tokens() == longest - 128
        result = pipe.generate(prompt[: longest - 1], max_new_tokens=2, ignore_eos=True)
        assert len(result.tokens[0]) == 1, "the model has no more positions"


def test_a_snapshot_survives_the_process(zoo, prompt_of, tmp_path):
    prompt, path = prompt_of(60), tmp_path / "chat.rows"
    with StaticLLMPipeline(zoo / "llama", "CPU", **SMALL) as pipe:
        answer = tokens_of(pipe, prompt, 20)
        longer = [*prompt, *answer, 5, 6]
        saved = pipe.save_snapshot(path, np.array(longer))
        expected = pipe.generate(np.array(longer), max_new_tokens=8, ignore_eos=True).tokens
        with pytest.raises(SnapshotError, match="no known sequence"):
            pipe.save_snapshot(tmp_path / "no", np.array([900, 901, 902]))
    assert saved == 79
    assert [entry.name for entry in tmp_path.iterdir()] == ["chat.rows"]
    with StaticLLMPipeline(zoo / "llama", "CPU", **SMALL) as pipe:
        assert pipe.load_snapshot(path) == 79
        result = pipe.generate(np.array(longer), max_new_tokens=8, ignore_eos=True)
        assert result.tokens == expected
        assert result.perf_metrics.get_num_cached_tokens() == 79


@pytest.mark.slow
def test_a_conversation_of_8000_tokens_by_default_and_over_a_restart(zoo, original, tmp_path):
    """Without lengths given, all that the model has positions for is taken; each turn reuses what the turns before it left."""
    folder, path, rng = tmp_path / "long", tmp_path / "chat.rows", np.random.default_rng(8)
    shutil.copytree(zoo / "llama", folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 9000}), encoding="utf-8")
    reference = original(folder)

    def talk(pipe, tokens, until):
        while len(tokens) < until:
            tokens += rng.integers(8, 1000, 400).tolist()
            num_known = len(tokens) - 401
            result = pipe.generate(np.array(tokens), max_new_tokens=100, ignore_eos=True)
            assert result.tokens[0] == reference.greedy(tokens, 100), f"after {len(tokens)} tokens"
            assert result.perf_metrics.get_num_cached_tokens() == max(0, num_known)
            tokens += result.tokens[0]
        return tokens

    with StaticLLMPipeline(folder, "CPU", **EXACT) as pipe:
        assert pipe.config.max_seq_len == 9000
        tokens = talk(pipe, [], 4000)
        assert pipe.save_snapshot(path, np.array(tokens)) == len(tokens) - 1
    with StaticLLMPipeline(folder, "CPU", **EXACT) as pipe:
        assert pipe.load_snapshot(path) == len(tokens) - 1
        assert len(talk(pipe, tokens, 8000)) == 8000


def test_a_snapshot_that_does_not_match_is_refused(zoo, prompt_of, tmp_path):
    path = tmp_path / "chat.rows"
    with StaticLLMPipeline(zoo / "llama", "CPU", **SMALL) as pipe:
        pipe.generate(np.array(prompt_of(40)), max_new_tokens=4)
        pipe.save_snapshot(path, np.array(prompt_of(40)))
        whole = path.read_bytes()
        rng = random.Random(0)
        for _ in range(60):
            place = rng.randrange(len(whole))
            broken = bytearray(whole)
            broken[place] ^= 1 << rng.randrange(8)
            path.write_bytes(broken)
            with pytest.raises(SnapshotError) as refused:
                pipe.load_snapshot(path)
            assert "\n" not in str(refused.value)
        for length in (0, 10, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            with pytest.raises(SnapshotError):
                pipe.load_snapshot(path)
        path.write_bytes(whole)
        with pytest.raises(SnapshotError, match="is not there"):
            pipe.load_snapshot(tmp_path / "nothing")
    with (
        StaticLLMPipeline(zoo / "qwen2", "CPU", **SMALL) as other,
        pytest.raises(SnapshotError, match="is of another model"),
    ):
        other.load_snapshot(path)

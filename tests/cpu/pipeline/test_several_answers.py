"""Tests ``num_return_sequences``: each answer equals that of a single call with the next seed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from support.attach.daemons import wait_for

from staticllm import GenerationConfigError, StaticLLMPipeline
from staticllm.pipelines.text.output_processor import kept_outputs

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
OPTIONS = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module", params=["llama", "lfm2"])
def pipe(zoo, request):
    with StaticLLMPipeline(zoo / request.param, "CPU", MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=64, **EXACT) as pipe:
        yield pipe


def test_answers_are_those_of_single_calls_with_the_next_seeds(pipe):
    prompt = np.array([5, 6, 7, 8, 9])
    results = pipe.generate(prompt, num_return_sequences=4, rng_seed=11, logprobs=1, **OPTIONS)
    alone = [pipe.generate(prompt, rng_seed=11 + i, logprobs=1, **OPTIONS) for i in range(4)]
    assert results.tokens == [answer.tokens[0] for answer in alone]
    assert len({tuple(t) for t in results.tokens}) > 1
    assert results.scores == pytest.approx([answer.scores[0] for answer in alone], rel=1e-3)
    assert results.perf_metrics.get_num_input_tokens() == 5
    assert results.perf_metrics.get_num_generated_tokens() == 48


def test_texts_are_in_the_order_of_the_prompts(pipe):
    texts = pipe.generate(["hello", "world"], num_return_sequences=2, rng_seed=3, **OPTIONS).texts
    single = [pipe.generate([p], num_return_sequences=2, rng_seed=3, **OPTIONS).texts for p in ("hello", "world")]
    assert texts == [*single[0], *single[1]]
    handle = pipe.submit("hello", num_return_sequences=2, rng_seed=3, **OPTIONS)
    assert handle.result().texts == texts[:2]
    assert [output.text for output in handle.outputs()] == texts[:2]


def test_a_stop_string_ends_only_its_answer(pipe):
    whole = pipe.generate("hello", num_return_sequences=3, rng_seed=3, **OPTIONS).texts
    stop = whole[1][3:6]
    texts = pipe.generate("hello", num_return_sequences=3, rng_seed=3, stop_strings={stop}, **OPTIONS).texts
    assert texts == [text[: text.index(stop)] if stop in text else text for text in whole]


def test_more_answers_than_places_and_slots_take_turns(zoo):
    lengths = {"MAX_PROMPT_LEN": 32, "MIN_RESPONSE_LEN": 32, "MAX_NUM_SEQS": 2, "KV_SLOTS": 64}
    with StaticLLMPipeline(zoo / "llama", "CPU", **lengths, **EXACT) as pipe:
        prompt = np.array([5, 6, 7, 8, 9])
        results = pipe.generate(prompt, num_return_sequences=24, rng_seed=11, **OPTIONS)
        alone = [pipe.generate(prompt, rng_seed=11 + i, **OPTIONS).tokens[0] for i in range(24)]
        assert results.tokens == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_return_sequences": 2}, "num_return_sequences=2 with do_sample=False: greedy answers are all the same"),
        ({"num_return_sequences": 0}, "num_return_sequences=0: must be a whole number from 1 to 128"),
        ({"num_return_sequences": 2, "do_sample": True, "streamer": print}, "could not tell the answers apart"),
    ],
)
def test_impossible_combinations_are_one_line_errors(pipe, options, message):
    with pytest.raises(GenerationConfigError, match=message):
        pipe.generate("hello", max_new_tokens=4, **options)
    handle = pipe.submit("hello", num_return_sequences=2, **OPTIONS)
    with pytest.raises(GenerationConfigError, match="several answers cannot be read as one text"):
        list(handle)
    assert len(handle.result().texts) == 2
    pipe.start_chat()
    with pytest.raises(GenerationConfigError, match="one answer per turn"):
        pipe.generate("hello", num_return_sequences=2, **OPTIONS)
    pipe.finish_chat()


def test_an_unread_request_ends_at_its_stop_string(zoo):
    with StaticLLMPipeline(zoo / "llama", "CPU", MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=960, **EXACT) as pipe:
        whole = pipe.generate("hello", max_new_tokens=20, ignore_eos=True)
        stop = whole[8:11]
        handle = pipe.submit("hello", stop_strings={stop}, ignore_eos=True)
        wait_for(lambda: pipe.engine.is_idle and pipe.stats().finish_reasons.get("stop"), 60)
        assert pipe.stats().num_tokens < 200, "it ended long before the slots were full"
        assert handle.result() == whole[: whole.index(stop)]
        assert handle.finish_reason == "stop"


def test_best_of_returns_the_most_likely_answers(pipe):
    options = {"do_sample": True, "temperature": 1.5, "rng_seed": 3, "max_new_tokens": 12, "ignore_eos": True}
    every = pipe.generate(["Hello"], num_return_sequences=6, logprobs=1, **options)
    best = pipe.generate(["Hello"], best_of=6, num_return_sequences=2, **options)
    order = sorted(range(6), key=lambda index: -every.scores[index])
    assert best.texts == [every.texts[index] for index in order[:2]]
    assert best.scores == pytest.approx([every.scores[index] for index in order[:2]])


def test_an_answer_that_had_no_turn_is_not_the_most_likely():
    outputs = [
        SimpleNamespace(score=score, token_times=times) for score, times in ((0.0, []), (-9.0, [1.0]), (-2.0, [1.0]))
    ]
    options = SimpleNamespace(extra=SimpleNamespace(best_of=3), num_return_sequences=2)
    assert kept_outputs(outputs, options) == [outputs[2], outputs[1]]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"best_of": 2}, "best_of=2 with do_sample=False"),
        ({"best_of": 2, "do_sample": True, "num_return_sequences": 3}, "best_of=2 with num_return_sequences=3"),
        ({"best_of": 200, "do_sample": True}, "best_of=200"),
        ({"best_of": 2, "do_sample": True, "max_ngram_size": 2}, "best_of=2 with drafts"),
        ({"best_of": 2, "do_sample": True, "streamer": print}, "a streamer for 2 answers"),
    ],
)
def test_best_of_is_checked(pipe, options, message):
    with pytest.raises(GenerationConfigError, match=message):
        pipe.generate("Hello", max_new_tokens=3, **options)

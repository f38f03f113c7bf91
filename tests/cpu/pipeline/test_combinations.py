"""Tests requests that use several features at once: each gets the answer that it gets alone, whatever runs beside it."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.helpers import EXACT
from support.quick import examples

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.errors import GenerationConfigError
from staticllm.pipelines.scheduling.planner import POLICIES

pytestmark = pytest.mark.usefixtures("shared_programs")

PROMPTS = ("What is an NPU?", "Tell me a story about a fox.", "one two three one two three one two", "Hello")
SIZES = {"MAX_PROMPT_LEN": 128, "MIN_RESPONSE_LEN": 64}
NUMBER = r"[0-9]{2,9}"


def maybe(*values):
    return st.sampled_from([None, *values])


features = st.fixed_dictionaries(
    {
        "do_sample": maybe(True),
        "temperature": maybe(0.7, 1.5),
        "top_k": maybe(5, 40),
        "top_p": maybe(0.8),
        "repetition_penalty": maybe(1.3),
        "num_return_sequences": maybe(3),
        "num_beams": maybe(2, 4),
        "max_ngram_size": maybe(2, 3),
        "regex": maybe(NUMBER),
        "choice": maybe(["yes", "no", "perhaps"]),
        "stop_strings": maybe(["a", "th"]),
        "min_new_tokens": maybe(3),
        "logprobs": maybe(1),
        "logit_bias": maybe({5: 2.0}),
        "no_repeat_ngram_size": maybe(2),
        "dry_multiplier": maybe(0.8),
        "mirostat": maybe(2),
        "typical_p": maybe(0.9),
        "overflow": maybe("shift", "context_shift"),
    }
)
requests = st.tuples(st.sampled_from(PROMPTS), features, st.integers(1, 24), st.integers(1, 1000))


def asked(features, count, seed):
    given = {name: value for name, value in features.items() if value is not None}
    return {**given, "max_new_tokens": max(count, given.get("min_new_tokens", 0)), "rng_seed": seed}


def begin(pipe, prompt, options):
    """Return the handle of a request, or the line with which it was refused."""
    try:
        return pipe.submit(prompt, **options)
    except GenerationConfigError as refused:
        assert "\n" not in str(refused)
        return str(refused)


def answers_of(handle):
    """Return the texts, rounded scores and finish reasons of a request, or the line with which it ended."""
    if isinstance(handle, str):
        return handle
    try:
        outputs = handle.outputs()
    except GenerationConfigError as error:
        assert "\n" not in str(error)
        return str(error)
    return [(output.text, round(output.score, 2), str(output.finish_reason)) for output in outputs]


@pytest.fixture(scope="module")
def alone():
    with StaticLLMPipeline(demo_model_path(), "CPU", **EXACT, **SIZES, PREFIX_CACHING=False, MAX_NUM_SEQS=8) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def crowded():
    """Pipelines of each policy with few places, so that requests are swapped."""
    pipes = {
        name: StaticLLMPipeline(
            demo_model_path(), "CPU", **EXACT, **SIZES, MAX_NUM_SEQS=3, KV_SLOTS=512, SCHEDULER=name
        )
        for name in sorted(POLICIES)
    }
    yield pipes
    for pipe in pipes.values():
        pipe.close()


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(requests, min_size=1, max_size=6), st.sampled_from(sorted(POLICIES)))
def test_any_mixture_of_features_gives_the_answers_of_single_requests(alone, crowded, mixture, policy):
    wanted = [(prompt, asked(chosen, count, seed)) for prompt, chosen, count, seed in mixture]
    expected = [answers_of(begin(alone, prompt, options)) for prompt, options in wanted]
    handles = [begin(crowded[policy], prompt, options) for prompt, options in wanted]
    for (_, options), handle, answers in zip(wanted, handles, expected, strict=True):
        assert answers_of(handle) == answers, options
        if isinstance(answers, str) or "stop_strings" in options:
            continue
        for text, _, reason in answers:
            if reason == "stop" and "regex" in options:
                assert re.fullmatch(NUMBER, text), options
            if reason == "stop" and "choice" in options:
                assert text in options["choice"]
    assert crowded[policy].stats().num_failed_steps == 0


def test_most_mixtures_are_accepted(alone):
    """The test above must not pass because everything is refused."""
    options = {
        "do_sample": True, "temperature": 0.7, "top_k": 40, "repetition_penalty": 1.3, "num_return_sequences": 3,
        "regex": NUMBER, "logprobs": 1, "logit_bias": {5: 2.0}, "typical_p": 0.9, "min_new_tokens": 1,
    }  # fmt: skip
    texts = alone.generate(["Hello"], max_new_tokens=24, **options).texts
    assert len(texts) == 3
    assert all(re.fullmatch(NUMBER, text) for text in texts)

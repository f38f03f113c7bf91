"""Tests Whisper's logits processors against the rules token by token, as GenAI's and transformers' sources have them."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from staticllm.pipelines.generation.beam_search import BeamRules
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.generation.sampler import Sampler
from staticllm.pipelines.generation.speech_rules import TimestampParams, TimestampRules
from staticllm.pipelines.speech.whisper_config import WhisperGenerationConfig, WhisperTokens, whisper_options
from staticllm.pipelines.speech.whisper_rules import language_of, language_rules, no_speech_rules, whisper_rules

TOKENS = WhisperTokens(eos=10, no_timestamps=13, languages={"en": 11, "de": 12})
BEGIN, VOCAB = 14, 24  # ten timestamps


def plainly(logits, generated, max_initial):
    """Apply the rules to a list, one token at a time."""
    logits = [float(value) for value in logits]
    last = bool(generated) and generated[-1] >= BEGIN
    before = len(generated) < 2 or generated[-2] >= BEGIN
    stamps = [token for token in generated if token >= BEGIN]
    for token in range(VOCAB):
        is_stamp = token >= BEGIN
        forbidden = token == TOKENS.no_timestamps
        forbidden |= last and before and is_stamp
        forbidden |= last and not before and token < TOKENS.eos
        if stamps:
            least = stamps[-1] if last and not before else stamps[-1] + 1
            forbidden |= is_stamp and token < least
        if not generated:
            forbidden |= not is_stamp or token > BEGIN + max_initial
        if forbidden:
            logits[token] = -math.inf
    stamp_sum = sum(math.exp(value) for value in logits[BEGIN:])
    if stamp_sum > math.exp(max(logits[:BEGIN])):
        logits[:BEGIN] = [-math.inf] * BEGIN
    return logits


@given(
    st.lists(st.integers(0, VOCAB - 1).filter(lambda token: token != TOKENS.no_timestamps), max_size=7),
    st.lists(st.floats(-4, 4, width=32), min_size=VOCAB, max_size=VOCAB),
    st.integers(0, 9),
)
def test_rules_are_those_of_the_definition(generated, values, max_initial):
    assume(abs(sum(math.exp(value) for value in values[BEGIN:]) - math.exp(max(values[:BEGIN]))) > 1e-3)
    logits = np.array(values, np.float32)
    rules = TimestampRules(TimestampParams(TOKENS.eos, BEGIN, max_initial))
    for token in generated:
        rules.accept(token)
    rules.process(logits)
    np.testing.assert_allclose(logits, plainly(values, generated, max_initial))


def test_beams_copy_the_processors_of_a_model():
    options = options_of(suppress_tokens=[1])
    begin = options.tokens.timestamp_begin
    vocab_size = begin + 10
    rules = BeamRules(whisper_rules(options, has_timestamps=True).processors(vocab_size))
    rules.accept(begin + 2)
    other = rules.clone()
    rules.accept(5)
    logits = [np.zeros(vocab_size, np.float32) for _ in range(2)]
    logits[0][begin:] = 20
    rules.process(logits[0])
    other.process(logits[1])
    assert np.isfinite(logits[0]).nonzero()[0].tolist() == list(range(begin + 3, vocab_size)), "a segment may end"
    assert not np.isfinite(logits[1][begin:]).any(), "a segment begins with text"


def test_greedy_decoding_of_random_logits_makes_pairs():
    random = np.random.default_rng(0)
    rules = TimestampRules(TimestampParams(TOKENS.eos, BEGIN, 3))
    generated = []
    for _ in range(60):
        logits = random.normal(0, 3, VOCAB).astype(np.float32)
        rules.process(logits)
        if not np.isfinite(logits).any():
            break
        generated.append(int(logits.argmax()))
        rules.accept(generated[-1])
    stamps = [token for token in generated if token >= BEGIN]
    assert BEGIN <= generated[0] <= BEGIN + 3
    assert stamps == sorted(stamps)
    assert len(generated) > 8


def options_of(**values):
    return whisper_options(WhisperGenerationConfig(lang_to_id={"<|en|>": 50259}, eos_token_id=50257), values)


def test_suppressed_tokens():
    options = options_of(suppress_tokens=[1, 5, 99999], begin_suppress_tokens=[2])
    logits = np.zeros(60, np.float32)
    processors = whisper_rules(options, has_timestamps=False).processors(60)
    for each in processors:
        assert each.is_active
        each.process(logits)
        each.accept(7)
    assert np.flatnonzero(np.isinf(logits)).tolist() == [1, 2, 5]
    assert [each.is_active for each in processors] == [False, True]
    assert [each.remedy for each in processors] == ["shorten begin_suppress_tokens", "shorten suppress_tokens"]


def test_no_options_no_processors():
    assert whisper_rules(options_of(), has_timestamps=False).processors(51865) == []


def first_choice(rules, logits):
    return Sampler(SamplingParams(wants_logprobs=True), rules.processors(VOCAB), np.random.default_rng(0)).sample(
        logits
    )


def test_the_language_is_the_most_likely_of_the_known_ones():
    logits = np.zeros(VOCAB, np.float32)
    logits[[3, 11, 12]] = 9, 1, 2
    assert language_of(first_choice(language_rules(TOKENS), logits).token, TOKENS) == "de"


def test_the_probability_of_no_speech():
    logits = np.random.default_rng(0).normal(0, 5, VOCAB).astype(np.float32)
    expected = np.exp(logits.astype(np.float64))
    found = first_choice(no_speech_rules(TOKENS), logits)
    assert math.exp(found.logprob) == pytest.approx(expected[12] / expected.sum(), rel=1e-5)
    logits[:] = -1e30
    logits[12] = 500.0
    assert math.exp(first_choice(no_speech_rules(TOKENS), logits).logprob) == 1.0


def test_a_processor_takes_less_than_0_3_ms_for_a_vocabulary_of_52000():
    options = options_of(suppress_tokens=list(range(1, 90)), begin_suppress_tokens=[220, 50257])
    processors = whisper_rules(options, has_timestamps=True).processors(51865)
    processors[-1].accept(50364)
    logits = np.random.default_rng(0).normal(0, 4, 51865).astype(np.float32)
    best = [math.inf] * len(processors)
    for _ in range(50):
        for index, each in enumerate(processors):
            copied = logits.copy()
            start = time.thread_time()
            each.process(copied)
            best[index] = min(best[index], time.thread_time() - start)
    assert max(best) < 0.3e-3

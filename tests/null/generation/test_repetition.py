"""Tests bans, biases, no_repeat_ngram_size and DRY against their plain definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.generation.logits_processors import BadWords, DryPenalty, NoRepeatNgrams, processors_for
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.generation.sampler import Sampler

VOCAB = 6
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=40)
MANY = settings(max_examples=examples(300), deadline=None)


def processed(processor, answer):
    """Return the logits ``[vocab]`` that the processor makes of zeros after ``answer``."""
    for token in answer:
        processor.accept(token)
    logits = np.zeros(VOCAB, np.float32)
    if processor.is_active:
        processor.process(logits)
    return logits


@MANY
@given(tokens, tokens, st.integers(1, 5))
def test_no_ngram_occurs_twice(prompt, answer, size):
    text = [*prompt, *answer]
    grams = {tuple(text[i : i + size]) for i in range(len(text) - size + 1)}
    head = text[len(text) - size + 1 :] if size > 1 else []
    expected = [len(text) >= size - 1 and (*head, token) in grams for token in range(VOCAB)]
    assert (processed(NoRepeatNgrams(size, prompt), answer) == -np.inf).tolist() == expected


@MANY
@given(tokens, tokens, st.lists(st.lists(st.integers(0, VOCAB + 1), min_size=1, max_size=4), max_size=6))
def test_bad_words_cannot_be_completed(prompt, answer, words):
    text = [*prompt, *answer]
    expected = [
        any(
            word[-1] == token and text[max(0, len(text) - len(word) + 1) :] == word[:-1]
            for word in words
            if len(word) > 1
        )
        or [token] in words
        for token in range(VOCAB)
    ]
    assert (processed(BadWords(words, prompt, VOCAB), answer) == -np.inf).tolist() == expected


def plain_dry(text, multiplier, base, allowed, last_n, breakers):
    """Return the penalty of each token, by the definition: for every earlier place, compare backwards token by token."""
    window = text[max(0, len(text) - last_n) :] if last_n >= 0 else list(text)
    unbroken = 0
    while unbroken < len(text):
        end = len(text) - unbroken
        if any(text[max(0, end - len(each)) : end] == each for each in breakers):
            break
        unbroken += 1
    penalties = [0.0] * VOCAB
    for place in range(len(window) - 1):
        length = 0
        while length < min(place + 1, unbroken) and window[place - length] == window[len(window) - 1 - length]:
            length += 1
        if length >= allowed:
            following = window[place + 1]
            penalties[following] = max(penalties[following], multiplier * base ** (length - allowed))
    return penalties


@MANY
@given(
    tokens, tokens, st.integers(1, 4), st.sampled_from([-1, 0, 1, 2, 7, 30]), st.sampled_from([1.0, 1.3, 1.75, 3.0]),
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), max_size=2)
)  # fmt: skip
def test_dry_equals_the_plain_computation(prompt, answer, allowed, last_n, base, breakers):
    processor = DryPenalty(0.8, base, allowed, last_n, breakers, prompt)
    expected = plain_dry([*prompt, *answer], 0.8, base, allowed, last_n, breakers)
    assert np.allclose(-processed(processor, answer), expected, rtol=1e-5)


def test_dry_on_a_long_repetition_stays_finite():
    processor = DryPenalty(1.0, 3.0, 2, -1, [], [1] * 5000)
    logits = processed(processor, [])
    assert np.isfinite(logits).all()
    assert logits[1] < -1e37
    assert (logits[[0, 2, 3, 4, 5]] == 0).all()


def test_a_greedy_loop_is_broken_by_dry_and_by_ngrams():
    """The logits always prefer token ``last + 1`` modulo 3, so plain greedy decoding repeats 0 1 2."""

    def answer(**params):
        params = SamplingParams(**params)
        sampler, last, found = Sampler(params, processors_for(params, [0], VOCAB), np.random.default_rng(0)), 0, []
        for _ in range(12):
            logits = np.linspace(0, 0.1, VOCAB, dtype=np.float32)
            logits[(last + 1) % 3] = 3.0
            last = sampler.sample(logits).token
            found.append(last)
        return found

    assert answer() == [1, 2, 0] * 4
    assert answer(dry_multiplier=2.0)[:3] == [1, 2, 0]
    assert set(answer(dry_multiplier=2.0)) - {0, 1, 2}
    text = [0, *answer(no_repeat_ngram_size=3)]
    grams = [tuple(text[i : i + 3]) for i in range(len(text) - 2)]
    assert len(grams) == len(set(grams))
    assert answer(dry_multiplier=0.0, dry_base=3.0) == answer(dry_multiplier=2.0, dry_penalty_last_n=0) == answer()


def test_logit_bias_adds_and_is_seen_by_the_penalties():
    params = SamplingParams(logit_bias=((2, 4.0), (3, -1.5), (VOCAB + 3, 9.0)), repetition_penalty=2.0)
    processors = processors_for(params, [2, 3], VOCAB)
    logits = np.ones(VOCAB, np.float32)
    for processor in processors:
        processor.process(logits)
    assert logits.tolist() == [1, 1, (1 + 4) / 2, (1 - 1.5) * 2, 1, 1], "the bias comes first, as in llama.cpp"


def test_a_vocabulary_without_a_token_left_ends_with_one_line():
    params = SamplingParams(bad_words=tuple((token,) for token in range(VOCAB)))
    sampler = Sampler(params, processors_for(params, [], VOCAB), np.random.default_rng(0))
    with pytest.raises(GenerationConfigError, match=r"no token can be chosen: .*; shorten bad_words or logit_bias"):
        sampler.sample(np.zeros(VOCAB, np.float32))

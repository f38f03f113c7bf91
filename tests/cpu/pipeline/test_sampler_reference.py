"""Compares samplers through the pipeline with plain definitions over the logits of the original model in f32."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.helpers import SHORT

from staticllm import StaticLLMPipeline
from staticllm.pipelines.diagnostics.reference import StatefulReference

pytestmark = pytest.mark.usefixtures("shared_programs")
PROMPT = [20, 21, 22, 20, 21, 23, 20, 21]
COUNT = 20
MODELS = ("llama", "qwen3", "lfm2")
"""Attention, attention with normalised queries, and attention beside recurrent states."""


@pytest.fixture(scope="module", params=MODELS)
def models(request, zoo):
    path = zoo / request.param
    with StaticLLMPipeline(path, "CPU", **SHORT) as pipe:
        yield pipe, StatefulReference(path)


def no_repeat(text, logits, size):
    grams = {tuple(text[i : i + size]) for i in range(len(text) - size + 1)}
    head = tuple(text[len(text) - size + 1 :])
    for token in range(len(logits)):
        if (*head, token) in grams:
            logits[token] = -np.inf


def dry(text, logits, multiplier, base, allowed):
    longest = {}
    for place in range(len(text) - 1):
        length = 0
        while length <= place and text[place - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= allowed:
            longest[text[place + 1]] = max(longest.get(text[place + 1], 0), length)
    for token, length in longest.items():
        logits[token] -= multiplier * base ** (length - allowed)


def bias(text, logits):
    logits[40] += 3.0
    logits[41] -= 50.0
    logits[42] = -np.inf


def bad_words(text, logits):
    for word in ([20, 21], [50], [21, 22, 20]):
        if text[len(text) - len(word) + 1 :] == word[:-1] or len(word) == 1:
            logits[word[-1]] = -np.inf


GREEDY = [
    ({"no_repeat_ngram_size": 2}, lambda text, logits: no_repeat(text, logits, 2)),
    ({"no_repeat_ngram_size": 1}, lambda text, logits: no_repeat(text, logits, 1)),
    ({"dry_multiplier": 4.0, "dry_sequence_breakers": []}, lambda text, logits: dry(text, logits, 4.0, 1.75, 2)),
    ({"dry_multiplier": 2.0, "dry_base": 3.0, "dry_allowed_length": 1, "dry_sequence_breakers": []},
     lambda text, logits: dry(text, logits, 2.0, 3.0, 1)),
    ({"logit_bias": {40: 3, 41: -50, 42: False}}, bias),
    ({"bad_words_ids": [[20, 21], [50], [21, 22, 20]]}, bad_words),
]  # fmt: skip


@pytest.mark.parametrize(("options", "change"), GREEDY)
def test_greedy_answers_are_those_of_the_plain_definition(models, options, change):
    pipe, reference = models
    reference.reset()
    text, expected = list(PROMPT), []
    logits = reference.logits(text)[-1].astype(np.float64)
    for _ in range(COUNT):
        change(text, logits)
        expected.append(int(np.argmax(logits)))
        text.append(expected[-1])
        logits = reference.logits(expected[-1:])[-1].astype(np.float64)
    assert pipe.generate(np.array(PROMPT), max_new_tokens=COUNT, ignore_eos=True, **options).tokens == [expected]
    handles = [
        pipe.submit(np.array(PROMPT), max_new_tokens=COUNT, ignore_eos=True, **given)
        for given in (options, {"do_sample": True, "rng_seed": 3}, options, {})
    ]
    assert handles[0].result().tokens == handles[2].result().tokens == [expected], "batched with others"


def probabilities_of(logits, temperature):
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return weights / weights.sum()


def typical_limit(probabilities, share):
    """Return the largest distance from the entropy that a kept token has."""
    surprise = -np.log(probabilities)
    distance = np.abs(surprise - (probabilities * surprise).sum())
    order = np.argsort(distance)
    return distance, distance[order[int(np.searchsorted(np.cumsum(probabilities[order]), share))]]


def check_typical(probabilities, token, state):
    distance, limit = typical_limit(probabilities, 0.4)
    assert distance[token] <= limit + 1e-3


def check_xtc(probabilities, token, state):
    top = np.flatnonzero(probabilities >= 0.01 + 1e-5)
    assert len(top) < 2 or probabilities[token] <= probabilities[top].min() + 1e-5


def check_mirostat(probabilities, token, state):
    limit = state.setdefault("limit", 2 * 4.0)
    assert -math.log2(probabilities[token]) <= limit + 1e-3 or probabilities[token] == probabilities.max()
    kept = probabilities[-np.log2(probabilities) <= limit]
    kept = kept if len(kept) else probabilities.max(keepdims=True)
    state["limit"] = limit - 0.5 * (-math.log2(probabilities[token] / kept.sum()) - 4.0)


DRAWN = [
    ({"typical_p": 0.4}, check_typical),
    ({"xtc_probability": 1.0, "xtc_threshold": 0.01}, check_xtc),
    ({"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.5}, check_mirostat),
]


@pytest.mark.parametrize(("options", "check"), DRAWN)
def test_drawn_tokens_are_among_those_of_the_plain_definition(models, options, check):
    pipe, reference = models
    for temperature, seed in ((0.3, 1), (1.0, 2)):
        (tokens,) = pipe.generate(
            np.array(PROMPT), max_new_tokens=COUNT, ignore_eos=True, do_sample=True, temperature=temperature,
            rng_seed=seed, **options
        ).tokens  # fmt: skip
        reference.reset()
        state = {}
        logits = reference.logits(PROMPT)[-1]
        for token in tokens:
            check(probabilities_of(logits, temperature), token, state)
            logits = reference.logits([token])[-1]
        assert len(set(tokens)) > 1

"""Tests beam search on tables of logits: against all answers where they can be listed, and the rules that every answer keeps."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.beam_steps import advanced
from support.quick import examples

from staticllm.pipelines.generation.beam_search import BeamLimits, BeamParams, BeamSearch, repeating_tokens

VOCAB = 7
STOP = 6


def logits_after(tokens, seed):
    """Return the logits ``[VOCAB]`` of a model without any structure."""
    return np.random.default_rng([seed, len(tokens), *tokens]).normal(size=VOCAB).astype(np.float32) * 2


def logprobs_after(tokens, seed):
    logits = logits_after(tokens, seed).astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def search(params, seed, limits, prompt=(), ending=None):
    """Run a search to its end; return it, and the number of beams of each step."""
    found, beams, sizes = BeamSearch(params, prompt, limits, ending), [()], []
    while beams:
        sizes.append(len(beams))
        steps = advanced(found, [logits_after(beam, seed) for beam in beams])
        beams = [(*beams[step.parent], step.token) for step in steps]
    assert found.is_done
    return found, sizes


def total_of(tokens, seed):
    return sum(logprobs_after(tokens[:place], seed)[token] for place, token in enumerate(tokens))


@given(st.integers(0, 10_000), st.integers(1, 3), st.floats(-1.0, 2.0))
@settings(max_examples=examples(100), deadline=None)
def test_with_enough_beams_the_best_of_all_answers_are_found(seed, length, penalty):
    params = BeamParams(VOCAB**length, length_penalty=penalty, stop_criteria="never")
    found, _ = search(params, seed, BeamLimits(length))
    listed = {tokens: total_of(tokens, seed) for tokens in itertools.product(range(VOCAB), repeat=length)}
    hypotheses = found.hypotheses()
    assert {hypothesis.tokens for hypothesis in hypotheses} == set(listed)
    assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
    for hypothesis in hypotheses:
        assert hypothesis.score == pytest.approx(listed[hypothesis.tokens] / length**penalty, abs=1e-4)
        assert sum(hypothesis.logprobs) == pytest.approx(listed[hypothesis.tokens], abs=1e-4)


@given(
    seed=st.integers(0, 10_000),
    group_size=st.integers(1, 4),
    groups=st.integers(1, 3),
    length=st.integers(1, 8),
    min_new=st.integers(0, 4),
    criteria=st.sampled_from(["early", "heuristic", "never"]),
    penalty=st.floats(-1.0, 2.0),
    ngram=st.none() | st.integers(1, 3),
)
@settings(max_examples=examples(300), deadline=None)
def test_every_answer_keeps_the_rules(seed, group_size, groups, length, min_new, criteria, penalty, ngram):
    params = BeamParams(group_size * groups, groups, 0.7 if groups > 1 else 0.0, penalty, ngram, criteria)
    min_new, prompt = min(min_new, length), (1, 2, 3)
    found, sizes = search(params, seed, BeamLimits(length, {STOP}, min_new), prompt)
    assert all(size <= params.num_beams for size in sizes)
    assert len(sizes) <= length
    assert len(found.hypotheses()) <= params.num_beams
    for hypothesis in found.hypotheses():
        tokens = hypothesis.tokens
        assert hypothesis.reason == ("stop" if tokens[-1] == STOP else "length")
        assert len(tokens) == length or tokens[-1] == STOP
        assert STOP not in tokens[:-1]
        assert STOP not in tokens[:min_new]
        if ngram is not None:
            everything = [*prompt, *tokens]
            grams = [tuple(everything[i : i + ngram]) for i in range(len(everything) - ngram + 1)]
            fresh = grams[len(prompt) - ngram + 1 :] if ngram <= len(prompt) else grams
            assert len(set(fresh)) == len(fresh)
            assert not set(fresh) & set(grams[: len(grams) - len(fresh)])
        if groups == 1:
            assert sum(hypothesis.logprobs) == pytest.approx(total_of(tokens, seed), abs=1e-3)
        assert hypothesis.score == pytest.approx(sum(hypothesis.logprobs) / len(tokens) ** penalty, abs=1e-4)


def test_a_single_beam_is_greedy_decoding():
    found, _ = search(BeamParams(1), 5, BeamLimits(6))
    greedy = ()
    for _ in range(6):
        greedy = (*greedy, int(logits_after(greedy, 5).argmax()))
    assert found.hypotheses()[0].tokens == greedy


def test_groups_avoid_the_tokens_of_groups_before_them():
    found, _ = search(BeamParams(3, 3, diversity_penalty=50.0), 1, BeamLimits(1))
    order = np.argsort(-logits_after((), 1))
    assert {hypothesis.tokens[0] for hypothesis in found.hypotheses()} == set(order[:3].tolist())
    plain, _ = search(BeamParams(3, 3, diversity_penalty=1e-9), 1, BeamLimits(1))
    assert {hypothesis.tokens[0] for hypothesis in plain.hypotheses()} == {int(order[0])}


def test_early_ends_with_the_first_answers_and_never_looks_for_better_ones():
    lengths = {}
    for criteria in ("early", "never"):
        total = 0
        for seed in range(40):
            _, sizes = search(BeamParams(2, length_penalty=2.0, stop_criteria=criteria), seed, BeamLimits(12, {STOP}))
            total += len(sizes)
        lengths[criteria] = total
    assert lengths["early"] < lengths["never"]


def test_a_text_that_ends_an_answer():
    found, _ = search(BeamParams(2), 3, BeamLimits(9), ending=lambda tokens: len(tokens) >= 2 and sum(tokens[-2:]) == 7)
    ended = [hypothesis for hypothesis in found.hypotheses() if hypothesis.reason == "stop"]
    assert ended
    assert all(sum(hypothesis.tokens[-2:]) == 7 for hypothesis in ended)


def test_an_end_from_outside_gives_the_beams_so_far():
    beams = BeamSearch(BeamParams(3), (), BeamLimits(None))
    steps = advanced(beams, [logits_after((), 2)])
    advanced(beams, [logits_after((step.token,), 2) for step in steps])
    beams.end("cancelled")
    assert beams.is_done
    assert [len(hypothesis.tokens) for hypothesis in beams.hypotheses()] == [2, 2, 2]


@given(st.lists(st.integers(0, 3), max_size=14), st.none() | st.integers(1, 5))
def test_repeating_tokens_against_a_definition(tokens, size):
    def repeats(token):
        grown = [*tokens, token]
        grams = [grown[i : i + size] for i in range(len(grown) - size + 1)]
        return grams[-1] in grams[:-1]

    is_long = size is not None and len(tokens) >= max(size, 2)
    expected = {token for token in range(4) if repeats(token)} if is_long else set()
    assert repeating_tokens(tokens, size) == expected


def test_scores_of_long_answers_are_finite():
    assert math.isfinite(search(BeamParams(2, length_penalty=0.0), 0, BeamLimits(30))[0].hypotheses()[0].score)

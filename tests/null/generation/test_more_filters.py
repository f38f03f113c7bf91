"""Tests typical_p, XTC and mirostat against their plain definitions."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.quick import examples

from staticllm.pipelines.generation.filters import typical, without_top_choices
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.generation.sampler import Mirostat, Sampler, candidate_distribution

VOCAB = 50


def random_logits(seed, scale=3.0, size=VOCAB):
    return np.random.default_rng(seed).normal(scale=scale, size=size).astype(np.float32)


def softmax(logits):
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def plain_typical(probabilities, share):
    """Return the kept tokens and the cumulative masses, by the definition in arXiv 2202.00666."""
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    entropy = sum(p * s for p, s in zip(probabilities, surprise, strict=True) if p > 0)
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    masses = np.cumsum(probabilities[order])
    count = int(np.searchsorted(masses, share)) + 1
    return order[:count], masses


@settings(max_examples=examples(300), deadline=None)
@example(3778, 0.3, 3000, 0.7404377114380737)  # two equally near tokens, one likely and one unlikely, at the border
@given(st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 3.0]), st.sampled_from([50, 3000]), st.floats(0.02, 0.999))
def test_typical_keeps_the_tokens_nearest_to_the_entropy(seed, scale, size, share):
    logits = random_logits(seed, scale, size)
    expected, masses = plain_typical(softmax(logits), share)
    kept = np.flatnonzero(typical(np.exp(logits - logits.max()), share))
    difference = list(set(kept.tolist()) ^ set(expected.tolist()))
    assert abs(len(kept) - len(expected)) <= 1
    if not difference:
        return
    probabilities = softmax(logits)
    distances = np.abs(-np.log(probabilities) - (probabilities * -np.log(probabilities)).sum())
    is_border = np.abs(distances[difference] - distances[expected[-1]]) < 1e-5
    # rounding may exchange equally near tokens, which may differ in mass, or move the border where the mass is that of the share
    if not is_border.all():
        assert len(difference) == 1
        assert abs(masses[min(len(kept), len(expected)) - 1] - share) < 1e-5


def test_typical_leaves_out_tokens_without_a_weight_and_may_leave_out_the_most_likely():
    weights = np.array([0.0, 0.6, 0.1, 0.1, 0.1, 0.1, 0.0], np.float32)
    # entropy 1.23: the four tokens of 0.1 (surprise 2.30) are 1.07 away, that of 0.6 (0.51) is 0.72 away
    assert np.flatnonzero(typical(weights, 0.5)).tolist() == [1]
    flat = np.array([0.1, 0.2, 0.2, 0.2, 0.2, 0.1], np.float32)
    assert np.flatnonzero(typical(flat, 0.7)).tolist() == [1, 2, 3, 4]
    peaked = np.array([0.35, *[0.05] * 13], np.float32)  # entropy 2.31: 1.05 → 1.26 away, 3.0 → 0.68 away
    assert not typical(peaked, 0.5)[0]


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 0.6))
def test_xtc_keeps_the_least_likely_of_the_top_choices(seed, threshold):
    probabilities = softmax(random_logits(seed, 1.0))
    order = np.argsort(-probabilities, kind="stable").tolist()
    top = [token for token in order if probabilities[token] >= threshold]
    expected = set(order) - set(top[:-1])
    kept = set(np.flatnonzero(without_top_choices((probabilities * 7).astype(np.float32), threshold)).tolist())
    near = {token for token in order if abs(probabilities[token] - threshold) < 1e-6}
    assert kept == expected or near


def test_xtc_keeps_an_allowed_token_at_threshold_0():
    """A grammar gives forbidden tokens a weight of 0, which is at least a threshold of 0."""
    weights = np.array([0.0, 0.5, 0.3, 0.2, 0.0], np.float32)
    assert (weights * without_top_choices(weights, 0.0)).tolist() == pytest.approx([0.0, 0.0, 0.0, 0.2, 0.0])


def test_xtc_excludes_top_choices_as_often_as_asked():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    for probability, first in ((0.0, 0.4), (1.0, 0.0), (0.25, 0.3)):
        params = SamplingParams(do_sample=True, xtc_probability=probability, xtc_threshold=0.25)
        sampler = Sampler(params, [], np.random.default_rng(3))
        counts = np.bincount([sampler.sample(logits).token for _ in range(4000)], minlength=4)
        assert counts[0] / 4000 == pytest.approx(first, abs=0.03)
    tokens, shares = candidate_distribution(logits, params, excludes_top=True)
    assert tokens.tolist() == [1, 2, 3]
    assert np.allclose(shares, [0.5, 1 / 3, 1 / 6], atol=1e-6)


def test_xtc_uses_random_numbers_of_its_own_only_where_it_is_on():
    logits = random_logits(3)
    plain = Sampler(SamplingParams(do_sample=True), [], np.random.default_rng(1))
    off = Sampler(SamplingParams(do_sample=True, xtc_threshold=0.0), [], np.random.default_rng(1))
    assert [plain.sample(logits) for _ in range(20)] == [off.sample(logits) for _ in range(20)]


def test_filters_apply_in_llama_cpps_order():
    """top_k keeps three tokens, typical_p drops the first of them, top_p the last, and XTC has one left."""
    logits = np.log(np.array([0.50, 0.16, 0.14, 0.12, 0.08], np.float32))
    kept = [0, 1, 2, 3]
    share = np.array([0.50, 0.16, 0.14, 0.12]) / 0.92
    typical_order, _ = plain_typical(share, 0.6)
    params = SamplingParams(do_sample=True, top_k=4, typical_p=0.6)
    tokens, _ = candidate_distribution(logits, params)
    assert set(tokens.tolist()) == {kept[index] for index in typical_order}
    narrow = SamplingParams(do_sample=True, top_k=4, typical_p=0.6, top_p=0.5)
    rest = share[sorted(typical_order)] / share[sorted(typical_order)].sum()
    count = int(np.searchsorted(np.cumsum(-np.sort(-rest)), 0.5)) + 1
    assert len(candidate_distribution(logits, narrow)[0]) == count


class PlainMirostat:
    """Mirostat 2 as llama.cpp writes it: sort, cut, normalise, draw, move."""

    def __init__(self, tau, eta):
        self.tau, self.eta, self.mu = tau, eta, 2 * tau

    def draw(self, probabilities, uniform):
        order = np.argsort(-probabilities, kind="stable")
        kept = [token for token in order if -math.log2(probabilities[token]) <= self.mu] or [order[0]]
        share = probabilities[kept] / probabilities[kept].sum()
        in_order = sorted(range(len(kept)), key=lambda index: kept[index])  # the draw goes by token id
        place = np.searchsorted(np.cumsum(share[in_order]), uniform, side="right")
        token = kept[in_order[min(int(place), len(kept) - 1)]]
        self.mu -= self.eta * (-math.log2(share[kept.index(token)]) - self.tau)
        return int(token)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 10**6), st.floats(0.5, 8.0), st.floats(0.0, 0.5))
def test_mirostat_equals_the_plain_computation(seed, tau, eta):
    rng, ours, plain = np.random.default_rng(seed), Mirostat(tau, eta), PlainMirostat(tau, eta)
    for step in range(20):
        logits, uniform = random_logits(seed + step, 2.0), float(rng.random())
        weights = np.exp(logits - logits.max())
        ours_token, plain_token = ours.draw(weights, uniform), plain.draw(softmax(logits), uniform)
        if ours_token != plain_token:  # a draw or a limit at the border of two tokens
            assert abs(ours._limit - plain.mu) < max(1.0, 20 * eta)
            return
        assert ours._limit == pytest.approx(plain.mu, abs=1e-3)


def test_mirostat_holds_the_surprise_near_its_target():
    params = SamplingParams(do_sample=True, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.1)
    logits = random_logits(0, 1.5, 5000)
    probabilities = softmax(logits)
    sampler = Sampler(params, [], np.random.default_rng(0))
    tokens = [sampler.sample(logits).token for _ in range(800)][300:]
    kept = np.sort(np.unique(tokens))
    assert len(kept) < 200, "a low target keeps few of 5000 tokens"
    surprise = -np.log2(probabilities[tokens] / probabilities[kept].sum())
    assert surprise.mean() == pytest.approx(3.0, abs=0.5)

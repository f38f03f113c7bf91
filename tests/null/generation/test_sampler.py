"""Tests samplers and filters against their plain definitions."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.quick import examples

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.generation.filters import BLOCK, draw, largest, typical, without_top_choices
from staticllm.pipelines.generation.logits_processors import processors_for
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.generation.sampler import Mirostat, SampledToken, Sampler, _kept_weights

VOCAB = 50


def sampler(prompt=(), seed=0, min_new_tokens=0, stop_token_ids=(), more=(), **params):
    """Return a sampler with the processors of these options, followed by those in ``more``."""
    params = SamplingParams(**params)
    processors = processors_for(params, list(prompt), VOCAB, min_new_tokens, stop_token_ids)
    return Sampler(params, [*processors, *more], np.random.default_rng(seed))


def random_logits(seed, scale=3.0, size=VOCAB):
    return np.random.default_rng(seed).normal(scale=scale, size=size).astype(np.float32)


def candidate_distribution(logits, params, excludes_top=False):
    """Return the tokens that can be drawn, ascending, and their probabilities. Mirostat has no part in it."""
    is_cut = params.top_k and params.top_k < len(logits)
    candidates = largest(logits, params.top_k) if is_cut else np.arange(len(logits))
    weights = _kept_weights(logits[candidates], params, excludes_top)
    kept = np.flatnonzero(weights)
    return candidates[kept], weights[kept].astype(np.float64) / weights.sum(dtype=np.float64)


TINY = 1e-30


def plain_distribution(logits, temperature, top_k, top_p, min_p):
    """Return the kept tokens (most likely first), their probabilities, and the cumulative mass after ``top_k``.

    This is the plain definition: it sorts everything, filters in order and renormalises.
    """
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    order = order[:top_k] if top_k else order
    share = probabilities[order].sum()
    masses = np.cumsum(probabilities[order]) / share
    keep = []
    for token, mass in zip(order, masses, strict=True):
        keep.append(token)
        if top_p < 1 and mass >= top_p:
            break
    keep = [token for token in keep if probabilities[token] >= min_p * probabilities[order[0]]]
    return keep, probabilities[keep] / probabilities[keep].sum(), masses


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**6), st.floats(0.1, 5), st.sampled_from([0, 1, 5, 49, 50]), st.floats(0.05, 1), st.floats(0, 0.9)
)
@example(776727, 0.17278756887448443, 50, 0.9999999999999999, 0.0)
@example(719761, 0.2668078036014266, 49, 0.9999999999999999, 0.0)
def test_filters_equal_the_plain_computation(seed, temperature, top_k, top_p, min_p):
    check_filters(random_logits(seed), temperature, top_k, top_p, min_p)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from([0.3, 1, 3]), st.sampled_from([3000, 3071, 40_000]), st.sampled_from([0, 40, 2000]),
    st.sampled_from([1.0, 0.95, 0.5]), st.sampled_from([0.0, 0.02])
)  # fmt: skip
def test_filters_of_a_large_vocabulary_equal_the_plain_computation(seed, scale, vocab, top_k, top_p, min_p):
    """Distributions are flat, peaked, or have many equally likely tokens."""
    logits = np.random.default_rng(seed).normal(scale=scale, size=vocab).astype(np.float32)
    check_filters(np.round(logits, 1) if seed % 2 else logits, 0.8, top_k, top_p, min_p)


def check_filters(logits, temperature, top_k, top_p, min_p):
    params = SamplingParams(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, probabilities = candidate_distribution(logits, params)
    expected, expected_probabilities, masses = plain_distribution(logits, temperature, top_k, top_p, min_p)
    assert (np.diff(tokens) > 0).all()
    # f32 may round the smallest probabilities to 0, so such tokens are left out on both sides
    tokens, probabilities = tokens[probabilities > TINY], probabilities[probabilities > TINY]
    expected = [token for token, p in zip(expected, expected_probabilities, strict=True) if p > TINY]
    expected_probabilities = expected_probabilities[expected_probabilities > TINY]
    if len(tokens) != len(expected):
        # rounding may add or drop tokens, but only if those before them have a mass of top_p. These are several only where top_p
        # is so near to 1 that what their probabilities add to the sum is less than the rounding of the sum
        shorter, longer = sorted([len(tokens), len(expected)])
        assert shorter
        assert top_p < 1
        assert longer - shorter == 1 or masses[longer - 1] - masses[shorter - 1] < 1e-12
        assert abs(masses[shorter - 1] - top_p) < 1e-6
        return
    dense, expected_dense = np.zeros(len(logits)), np.zeros(len(logits))
    dense[tokens], expected_dense[expected] = probabilities, expected_probabilities
    differing = sorted(set(tokens.tolist()) ^ set(expected))
    if differing:  # at the boundary, f32 cannot tell which of two tokens is more likely
        assert len(differing) == 2
        assert np.ptp(logits[differing]) < 1e-5
        dense[differing] = expected_dense[differing] = 0
    assert np.allclose(dense, expected_dense, atol=1e-5)


@pytest.mark.slow
def test_draws_from_a_large_vocabulary_follow_the_distribution():
    """The last block is shorter than the others and must be drawn from in proportion."""
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    drawer = Sampler(SamplingParams(do_sample=True), [], np.random.default_rng(1))
    counts = np.bincount([drawer.sample(logits).token for _ in range(60_000)], minlength=1000)
    expected = np.exp(logits.astype(np.float64))
    expected *= 60_000 / expected.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 1000 + 5 * np.sqrt(2 * 1000), (
        "chi-squared, 999 degrees of freedom"
    )
    assert counts[896:].sum() == pytest.approx(expected[896:].sum(), rel=0.05)


def test_greedy_takes_the_most_likely_token():
    logits = random_logits(1)
    assert sampler().sample(logits) == SampledToken(int(logits.argmax()), 0.0)


def test_log_probabilities_are_those_of_the_models_own_logits():
    logits = random_logits(2)
    choice = sampler(wants_logprobs=True).sample(logits)
    plain = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert choice.logprob == pytest.approx(plain[choice.token], abs=1e-5)


def test_draws_follow_the_distribution():
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[3, 7, 9]] = np.log([0.5, 0.3, 0.2])
    drawer = sampler(do_sample=True, seed=5)
    counts = np.bincount([drawer.sample(logits).token for _ in range(4000)], minlength=VOCAB)
    assert counts[[3, 7, 9]].sum() == 4000
    assert np.allclose(counts[[3, 7, 9]] / 4000, [0.5, 0.3, 0.2], atol=0.03)


def test_the_same_seed_draws_the_same_tokens():
    def tokens_of(seed):
        drawer = sampler(do_sample=True, seed=seed)
        return [drawer.sample(random_logits(i)).token for i in range(20)]

    assert tokens_of(3) == tokens_of(3)
    assert tokens_of(3) != tokens_of(4)


def test_repetition_penalty_counts_prompt_and_answer():
    logits = np.zeros(VOCAB, np.float32)
    logits[[4, 5, 6]] = [3.0, 2.5, 2.4]
    penalised = sampler(prompt=[4], repetition_penalty=2.0)
    assert [penalised.sample(logits).token for _ in range(3)] == [5, 6, 4]


def test_presence_and_frequency_penalties_count_the_answer_only():
    logits = np.zeros(VOCAB, np.float32)
    logits[[4, 5]] = [3.0, 2.0]
    assert sampler(prompt=[4], presence_penalty=2.0).sample(logits).token == 4
    frequent = sampler(frequency_penalty=0.4)
    assert [frequent.sample(logits).token for _ in range(5)] == [4, 4, 4, 5, 4]


def test_stop_tokens_are_not_chosen_before_min_new_tokens():
    logits = random_logits(3)
    first, second = np.argsort(-logits)[:2].tolist()
    early = sampler(min_new_tokens=2, stop_token_ids={first, VOCAB + 7})
    assert [early.sample(logits, best=first).token for _ in range(4)] == [second, second, first, first]
    drawer = sampler(do_sample=True, min_new_tokens=500, stop_token_ids={first})
    assert first not in [drawer.sample(logits).token for _ in range(500)]


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 1, "stop_token_ids": {1, 2}},
        {"repetition_penalty": 1.5, "prompt": [3, 4]},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "do_sample": True, "top_k": 5},
    ],
)
def test_the_callers_logits_are_not_changed(options):
    logits = random_logits(3)
    before, changing = logits.copy(), sampler(**options)
    for _ in range(3):
        changing.sample(logits)
    assert np.array_equal(logits, before)


class OnlyAscending:
    """Allows only larger tokens after each token, as a simple grammar might."""

    remedy = "allow smaller tokens"
    is_active = True

    def __init__(self):
        self.last = -1

    def process(self, logits):
        logits[: self.last + 1] = -np.inf

    def accept(self, token):
        self.last = token


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 20, "top_p": 0.9}])
def test_a_custom_processor_works_with_the_others(options):
    """The processor receives each chosen token, forbids tokens together with the others, and its remedy is in the error."""
    ascending = sampler(more=[OnlyAscending()], repetition_penalty=1.2, **options)
    tokens = []
    with pytest.raises(GenerationConfigError, match=r"no token can be chosen: .*; allow smaller tokens$"):
        for number in range(VOCAB + 1):
            tokens.append(ascending.sample(random_logits(number)).token)
    assert tokens == sorted(set(tokens))
    assert tokens[-1] == VOCAB - 1


def test_the_error_names_the_remedy_of_every_active_processor():
    everything = {"min_new_tokens": 5, "stop_token_ids": range(VOCAB)}
    with pytest.raises(GenerationConfigError) as error:
        sampler(**everything).sample(random_logits(0))
    assert str(error.value) == (
        "no token can be chosen: all 50 tokens are forbidden; lower min_new_tokens or shorten stop_token_ids"
    )
    with pytest.raises(GenerationConfigError, match=r"lower min_new_tokens .* or allow smaller tokens"):
        sampler(**everything, more=[OnlyAscending()]).sample(random_logits(0))


class Untouchable:
    """Logits that fail the test if they are read."""

    def __getattribute__(self, name):
        raise AssertionError(f"greedy decoding without processors needs no {name}")


def test_greedy_without_active_processors_reads_no_logits():
    logits = random_logits(4)
    assert sampler().sample(Untouchable(), best=7) == SampledToken(7, 0.0)
    early = sampler(min_new_tokens=1, stop_token_ids={3})
    early.sample(logits, best=int(logits.argmax()))
    assert early.sample(Untouchable(), best=3) == SampledToken(3, 0.0)


@pytest.mark.parametrize("seed", range(40))
def test_a_weight_of_zero_is_never_drawn(seed):
    """Sums of blocks and sums within a block are rounded differently, so the largest uniform number may exceed both."""
    rng = np.random.default_rng(seed)
    weights = rng.random(4 * BLOCK).astype(np.float32)
    weights[BLOCK - 28 : BLOCK] = weights[2 * BLOCK - 28 :] = 0.0
    for uniform in (np.nextafter(1.0, 0.0), 1.0):
        assert weights[draw(weights, uniform)] > 0.0


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
            assert abs(ours.limit - plain.mu) < max(1.0, 20 * eta)
            return
        assert ours.limit == pytest.approx(plain.mu, abs=1e-3)


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

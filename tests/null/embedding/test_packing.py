"""Tests packing: every text once, nothing overlaps, and calls are as cheap as the best that a search finds."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticllm.core import EncoderVariant
from staticllm.pipelines.embedding.packing.plan_calls import plan_calls

VARIANTS = tuple(
    EncoderVariant(batch, rows, max(batch, batch * rows // 8))
    for batch, rows in ((1, 16), (1, 32), (1, 64), (1, 128), (4, 128), (8, 128), (1, 512))
)


def cost(variant):
    return 2.0 + variant.batch * variant.rows * (0.02 + variant.rows * 5e-5)


def check(calls, lengths, is_packable=True):
    found = [index for call in calls for index in call.texts]
    assert sorted(found) == list(range(len(lengths)))
    for call in calls:
        assert len(call.sequences) <= call.variant.batch
        assert len(call.texts) <= call.variant.texts
        for sequence in call.sequences:
            assert sequence
            assert sum(lengths[index] for index in sequence) <= call.variant.rows
            assert is_packable or len(sequence) == 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 512), max_size=80), st.booleans())
def test_every_text_is_in_one_call_and_fits(lengths, is_packable):
    check(plan_calls(lengths, VARIANTS, cost, is_packable), lengths, is_packable)


def test_short_texts_share_sequences():
    lengths = [40, 30, 50, 90, 20, 26] * 50
    calls = plan_calls(lengths, VARIANTS, cost)
    used = sum(lengths) / sum(call.variant.batch * call.variant.rows for call in calls)
    assert used >= 0.95, "the fill that WindVE's prototype reached with real texts was 98.8 %"


@pytest.mark.parametrize("length", [1, 16, 17, 33, 64, 65, 128, 129, 512])
def test_one_text_gets_the_cheapest_call(length):
    (call,) = plan_calls([length], VARIANTS, cost)
    assert cost(call.variant) == min(cost(variant) for variant in VARIANTS if variant.rows >= length)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(100, 128), min_size=1, max_size=7), st.lists(st.floats(0.5, 3), min_size=7, max_size=7))
def test_full_sequences_are_divided_among_calls_at_the_least_cost(lengths, factors):
    """Texts of 100 to 128 tokens fill a sequence each, so all divisions can be tried."""
    costs = dict(zip(VARIANTS, (cost(v) * f for v, f in zip(VARIANTS, factors, strict=True)), strict=True))
    wide = [variant for variant in VARIANTS if variant.rows >= 128]
    calls = plan_calls(lengths, VARIANTS, costs.__getitem__)
    counts = itertools.product(range(len(lengths) + 1), repeat=len(wide))
    enough = (c for c in counts if sum(n * v.batch for n, v in zip(c, wide, strict=True)) >= len(lengths))
    best = min(sum(n * costs[v] for n, v in zip(c, wide, strict=True)) for c in enough)
    assert sum(costs[call.variant] for call in calls) <= best + 1e-9


def test_many_texts_are_not_bound_to_the_size_with_the_cheapest_tokens():
    """Tokens are cheapest in sequences of 64, but one text of 40 fills only 62 % of these, and three fill 94 % of 128."""
    variants = (EncoderVariant(16, 64, 128), EncoderVariant(8, 128, 128))
    seconds = dict(zip(variants, (0.98, 1.0), strict=True))
    lengths = [40] * 48
    calls = plan_calls(lengths, variants, seconds.__getitem__)
    assert [call.variant for call in calls] == [variants[1]] * 2
    check(calls, lengths)


def test_a_text_that_no_program_holds_is_refused():
    with pytest.raises(ValueError, match="513"):
        plan_calls([3, 513], VARIANTS, cost)
    with pytest.raises(ValueError, match="0"):
        plan_calls([3, 0], VARIANTS, cost)
    assert plan_calls([], VARIANTS, cost) == []

"""Tests common beginnings: who shares what, how calls are planned with them, and what the arrays of a call then hold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticllm.core import EncoderMask, EncoderShape, EncoderVariant
from staticllm.pipelines.embedding.packing.encoder_buffers import EncoderBuffers, pooling_weights
from staticllm.pipelines.embedding.packing.plan_calls import plan_calls
from staticllm.pipelines.embedding.packing.prefix_groups import LEAST_SHARED, find_groups, shared_with_previous
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.ports import HIDDEN

VARIANTS = tuple(EncoderVariant(b, r, b * r // 4) for b, r in ((1, 32), (1, 64), (4, 64), (1, 128), (2, 128)))
MASKS = (EncoderMask(None, 0), EncoderMask(5, 0))
SHAPE = EncoderShape("embeddings", 4, MASKS, 128, shares_prefixes=True, first_position=2, has_token_types=True)


def cost(variant):
    return 1.0 + variant.batch * variant.rows * (0.02 + variant.rows * 5e-5)


def text(*ids, types=None):
    return TokenizedText(np.array(ids, np.int64), None if types is None else np.array(types, np.int64))


def branch(draw_from, sizes):
    """Return texts that begin like one of a few stems, which begin alike themselves."""
    rng = np.random.default_rng(draw_from)
    stem = rng.integers(0, 3, 40)
    found = []
    for kept, more in sizes:
        found.append(TokenizedText(np.concatenate((stem[:kept], rng.integers(0, 3, more)))))
    return found


branches = st.builds(
    branch, st.integers(0, 99), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=40)
)


def test_no_group_without_common_beginnings():
    assert find_groups([]) is None
    assert find_groups([text(*range(20))]) is None
    assert find_groups([text(*range(20)), text(*range(1, 21))]) is None
    few = LEAST_SHARED - 1
    assert find_groups([text(*range(few), 50), text(*range(few), 51)]) is None


def test_types_are_part_of_a_beginning():
    ids = range(20)
    assert find_groups([text(*ids), text(*ids, types=[0] * 20)]) is not None
    assert find_groups([text(*ids), text(*ids, types=[1] * 20)]) is None


def test_two_queries_before_their_texts_are_two_groups_although_all_have_one_instruction():
    def pair(query, number):
        return text(*range(30), *[query] * 40, 90 + number, 5)

    texts = [pair(query, number) for number in range(4) for query in (70, 80)]
    found = find_groups(texts)
    assert [group.num_tokens for group in found.groups] == [70] * 8
    assert len({id(group) for group in found.groups}) == 2
    assert found.groups[0] is found.groups[2] is not found.groups[1]


def test_an_instruction_joins_many_queries_where_few_tokens_follow():
    texts = [text(*range(40), 50 + number, number) for number in range(6)]
    found = find_groups([*texts, text(*range(100, 140))])
    assert [group and group.num_tokens for group in found.groups] == [40] * 6 + [None]


@settings(deadline=None)
@given(branches)
def test_the_texts_of_a_group_have_their_beginning_in_common(texts):
    found = find_groups(texts)
    if found is None:
        return
    assert sorted(found.order) == list(range(len(texts)))
    for group in {id(group): group for group in found.groups if group is not None}.values():
        members = [t.ids for t, own in zip(texts, found.groups, strict=True) if own is group]
        assert len(members) > 1 and group.num_tokens >= LEAST_SHARED
        assert len({tuple(ids[: group.num_tokens]) for ids in members}) == 1


@settings(deadline=None, max_examples=60)
@given(branches)
def test_calls_with_shared_beginnings_hold_every_text_once_and_what_is_laid_out_is_what_was_planned(texts):
    prefixes = find_groups(texts)
    calls = plan_calls([len(t) for t in texts], VARIANTS, cost, True, prefixes)
    assert sorted(index for call in calls for index in call.texts) == list(range(len(texts)))
    for call in calls:
        assert len(call.sequences) <= call.variant.batch and len(call.texts) <= call.variant.texts
        check_arrays(call.variant, [[texts[index] for index in sequence] for sequence in call.sequences])
    plain = plan_calls([len(t) for t in texts], VARIANTS, cost)
    if prefixes is None:
        assert calls == plain


def check_arrays(variant, sequences):
    """Follow the tokens of each text through the arrays of a call: they see each other as if the text were alone."""
    buffers = EncoderBuffers(SHAPE, variant, 77)
    buffers.fill(sequences, "weighted_mean")
    arrays, number = buffers.arrays, 0
    for line, held in enumerate(sequences):
        owner, start, before = np.full(variant.rows, -1), 0, []
        for index, (each, num_shared) in enumerate(zip(held, shared_with_previous(held), strict=True)):
            path = [*before[:num_shared], *range(start, start + len(each) - num_shared)]
            start, before = start + len(each) - num_shared, path
            assert np.array_equal(arrays["input_ids"][line, path], each.ids)
            assert np.array_equal(arrays["position_ids"][line, path], 2 + np.arange(len(each)))
            weights = np.zeros(variant.batch * variant.rows, np.float32)
            weights[line * variant.rows + np.array(path)] = pooling_weights("weighted_mean", len(each))
            assert np.array_equal(arrays["pool"][number], weights)
            owner[path[num_shared:]] = index
            for kind in MASKS:
                mask = arrays[kind.port_name][line, 0]
                sees = [[kind.sees(key - query) for key in range(len(path))] for query in range(len(path))]
                assert np.array_equal(mask[np.ix_(path, path)] == 0, sees)
                others = np.setdiff1d(np.arange(variant.rows), path)
                assert np.all(mask[np.ix_(path, others)] == HIDDEN)
            number += 1
        assert np.all(arrays["input_ids"][line, owner < 0] == 77)


def test_a_query_before_many_texts_takes_rows_once():
    rng = np.random.default_rng(5)
    query = rng.integers(0, 99, 40)
    texts = [TokenizedText(np.concatenate((query, rng.integers(0, 99, 20)))) for _ in range(60)]
    lengths = [len(t) for t in texts]

    def rows(calls):
        return sum(call.variant.batch * call.variant.rows for call in calls)

    plain, shared = (plan_calls(lengths, VARIANTS, cost, True, found) for found in (None, find_groups(texts)))
    assert rows(shared) <= 0.6 * rows(plain)


def test_many_texts_share_their_beginning_in_the_largest_sequences_although_their_tokens_cost_more():
    """Of 40 texts not all sizes are tried, and a token is the cheapest in sequences that hold one text."""
    rng = np.random.default_rng(6)
    query = rng.integers(0, 99, 40)
    texts = [TokenizedText(np.concatenate((query, rng.integers(0, 99, 20)))) for _ in range(40)]
    variants = tuple(EncoderVariant(1, rows, rows // 4) for rows in (60, 64, 72, 80, 96, 256))
    seconds = {variant: variant.rows * (1.05 if variant.rows == 256 else 1.0) for variant in variants}
    calls = plan_calls([60] * 40, variants, seconds.__getitem__, True, find_groups(texts))
    assert {call.variant.rows for call in calls} == {256}


def test_texts_that_are_the_same_take_the_rows_of_one():
    texts = [text(*range(60))] * 8
    (call,) = plan_calls([60] * 8, VARIANTS, cost, True, find_groups(texts))
    assert call.variant.batch * call.variant.rows == 64
    check_arrays(call.variant, [[texts[index] for index in sequence] for sequence in call.sequences])


@pytest.mark.parametrize("shares", [True, False])
def test_only_a_model_that_allows_it_shares_rows(shares):
    shape = EncoderShape("embeddings", 4, (EncoderMask(None, 0),), 64, shares_prefixes=shares)
    buffers = EncoderBuffers(shape, EncoderVariant(1, 64, 4), 77)
    buffers.fill([[text(*range(20)), text(*range(19), 30)]], "last")
    assert np.sum(buffers.arrays["input_ids"] != 77) == (21 if shares else 40)

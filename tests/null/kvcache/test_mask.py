"""Compares masks with the plain definition: q sees k if k is in the same sequence, not later, and in the window."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.core import MaskKind, Variant
from staticllm.kvcache.cache import KVCache
from staticllm.kvcache.step import BufferPool, Segment, Step, StepBuffers, buffer_bytes
from staticllm.testing import fake_shape

KINDS = (MaskKind(), MaskKind(3), MaskKind(7))
SHAPE = fake_shape(KINDS)


def plain_mask(step, kind):
    rows, kv_len = step.variant.rows, step.variant.kv_len
    seen = np.zeros((rows, kv_len + rows), bool)
    seen[np.arange(rows), kv_len + np.arange(rows)] = True
    for start, segment in step.placed():
        past = len(segment.sequence)
        columns = [*segment.sequence.slots.tolist(), *(kv_len + start + i for i in range(len(segment.tokens)))]
        for i in range(len(segment.tokens)):
            for position, column in enumerate(columns):
                in_window = kind.window is None or position > past + i - kind.window
                seen[start + i, column] = position <= past + i and in_window
    return seen


def check(cache, step, buffers):
    cache.fill(step, buffers)
    for kind in KINDS:
        assert np.array_equal(buffers.masks[kind][0, 0] == 0, plain_mask(step, kind)), kind.label
        assert buffers.masks[kind].max() == 0
        assert np.unique(buffers.masks[kind]).size <= 2


def new_cache():
    variants = [Variant(1, 16), Variant(1, 32), Variant(8, 0), Variant(8, 32), Variant(8, 32, 3)]
    pool = BufferPool(variants, SHAPE)
    return KVCache(SHAPE, [16, 32]), {variant: StepBuffers(variant, pool) for variant in variants}


moves = st.lists(
    st.tuples(st.sampled_from(["chunk", "decode", "cut", "new"]), st.integers(0, 2), st.integers(1, 8)), max_size=25
)


@given(moves)
def test_every_step_has_the_mask_of_the_plain_definition(history):
    """Three sequences run chunks, decode steps, cuts and new conversations in any order, through one set of buffers."""
    cache, buffers = new_cache()
    sequences = [cache.open() for _ in range(3)]
    for move, which, size in history:
        sequence = sequences[which]
        if move == "cut":
            cache.cut(sequence, min(size, len(sequence)))
            continue
        if move == "new":
            cache.close(sequence)
            sequences[which] = cache.open()
            continue
        count = 1 if move == "decode" else size
        if cache.slots.num_free < count:
            continue
        high = cache.slots.high_slot
        kv_len = cache.kv_len_for(high) if move == "decode" else (32 if high else 0)
        variant = Variant(1, kv_len) if move == "decode" else Variant(8, kv_len)
        step = Step(variant, (Segment(sequence, np.arange(count)),))
        check(cache, step, buffers[variant])
        cache.commit(step, buffers[variant])


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 1, 4), (8, 0, 0), (2, 2, 0)])
def test_sequences_that_share_a_step_do_not_see_each_other(sizes):
    cache, buffers = new_cache()
    variant = Variant(8, 32, 3)
    sequences = [cache.open() for _ in range(3)]
    for length, sequence in zip((5, 2, 0), sequences, strict=True):
        first = Step(variant, (Segment(sequence, np.arange(length)),))
        if length:
            check(cache, first, buffers[variant])
            cache.commit(first, buffers[variant])
    segments = [Segment(s, np.arange(n)) for s, n in zip(sequences, sizes, strict=True) if n]
    check(cache, Step(variant, tuple(segments)), buffers[variant])


def test_buffer_bytes_equals_the_memory_of_the_buffers():
    variants = [Variant(1, 16), Variant(1, 64), Variant(8, 0), Variant(8, 64, 2), Variant(8, 32)]
    pool = BufferPool(variants, SHAPE)
    arrays = [*pool.masks.values(), pool.logits, *pool.presents]
    assert sum(array.nbytes for array in arrays) == buffer_bytes(variants, SHAPE)


def test_all_variants_share_the_memory_of_the_largest():
    variants = [Variant(1, 64), Variant(8, 64, 2), Variant(8, 0)]
    pool = BufferPool(variants, SHAPE)
    for buffers in (StepBuffers(variant, pool) for variant in variants):
        for kind, mask in buffers.masks.items():
            assert np.shares_memory(mask, pool.masks[kind])
        assert buffers.logits.shape == (1, buffers.variant.sequences, SHAPE.vocab_size)
        assert np.shares_memory(buffers.logits, pool.logits)

"""Tests what a KV cache allows while a call whose blocks run one by one reads its slots."""

import numpy as np
import pytest

from staticllm.core import Variant
from staticllm.kvcache.cache import KVCache
from staticllm.kvcache.step import BufferPool, Segment, Step, StepBuffers
from staticllm.ports import HIDDEN
from staticllm.testing.device import CAUSAL, fake_shape

VARIANTS = (Variant(1, 32), Variant(1, 64), Variant(8, 32), Variant(8, 64))
SHAPE = fake_shape((CAUSAL,), num_adapters=0)


def tokens(*values):
    return np.array(values, np.int64)


def run(cache, pool, sequence, values, kv_len=32):
    """Run tokens of one sequence that are all finite, and return the visible columns of the first row."""
    variant = Variant(1 if len(values) == 1 else 8, kv_len)
    buffers = StepBuffers(variant, pool)
    step = Step(variant, (Segment(sequence, tokens(*values)),))
    cache.fill(step, buffers)
    seen = np.flatnonzero(buffers.masks[CAUSAL][0, 0, 0] != HIDDEN)
    cache.commit(step, buffers)
    return seen.tolist()


def test_slots_that_a_call_reads_stay_where_they_are():
    cache = KVCache(SHAPE, [32, 64])
    pool = BufferPool(VARIANTS, SHAPE)
    sequence = cache.open()
    run(cache, pool, sequence, range(6))
    other = cache.open()
    run(cache, pool, other, range(20, 26))
    cache.close(sequence)
    cache.arena.is_read = True
    with pytest.raises(AssertionError, match="at their old places"):
        cache.arena.set_stride(64, cache.slots.high_slot)
    with pytest.raises(AssertionError, match="at their old places"):
        cache.arena.move(np.array([7]), np.array([0]))
    cache.arena.set_stride(32, cache.slots.high_slot)
    cache.arena.is_read = False
    cache.arena.set_stride(64, cache.slots.high_slot)


def test_masks_of_two_pools_are_painted_apart():
    """A single row repaints only what has changed since the last row that used the same memory."""
    cache = KVCache(SHAPE, [32, 64])
    own = BufferPool(VARIANTS, SHAPE)
    inserted = BufferPool(VARIANTS, SHAPE, own.adapters)
    first = cache.open()
    second = cache.open()
    run(cache, own, first, range(4))
    run(cache, own, second, range(50, 53))
    for number in range(8):
        for pool, sequence in ((own, first), (inserted, first), (inserted, second), (inserted, second), (own, first)):
            slots = sorted(sequence.slots.tolist())
            assert run(cache, pool, sequence, (number,))[: len(slots)] == slots
            if cache.slots.num_used == 32:
                return
    raise AssertionError("the arena was not filled")


def test_two_pools_share_no_memory_but_adapters():
    one, other = (BufferPool(VARIANTS, SHAPE) for _ in range(2))
    for variant in VARIANTS:
        mine, others = StepBuffers(variant, one), StepBuffers(variant, other)
        for name in ("input_ids", "position_ids", "logit_rows", "logits", "key_positions", "query_positions"):
            assert not np.shares_memory(getattr(mine, name), getattr(others, name))
        assert not np.shares_memory(mine.masks[CAUSAL], others.masks[CAUSAL])
        assert not any(map(np.shares_memory, mine.presents, others.presents))
    adapters = {"adapter": np.zeros(3)}
    assert BufferPool(VARIANTS, SHAPE, adapters).adapters is adapters

"""Finished sequences stay in their pages: found again without a copy, until others need the pages or there are too many."""

import mmap
import sys

import numpy as np
import pytest
from support.engine.paged import PAGE, Paged
from support.quick import examples

from staticllm.core import Variant
from staticllm.kvcache.host_pool import HostPool
from staticllm.kvcache.prefix import PrefixCache

LENGTH = 20


def tokens_of(number, length=LENGTH):
    return [100 * number + place for place in range(1, length + 1)]


class Conversations:
    """A cache in pages for ``num_slots`` slots, and a pool for ``pool_slots``."""

    def __init__(self, num_slots=256, pool_slots=1000):
        self.paged = Paged(num_slots, Variant(64, num_slots, 6))
        self.cache = self.paged.cache
        self.pool = HostPool(pool_slots)
        self.prefix = PrefixCache(self.cache, self.pool)

    def answer(self, tokens):
        """Run a prompt in calls of at most 64 rows, as a request does, and let it end. Return how many tokens were cached."""
        sequence = self.prefix.attach(tokens, ())
        cached = len(sequence)
        assert sequence.tokens == tokens[:cached]
        for start in range(cached, len(tokens), 64):
            part = tokens[start : start + 64]
            self.prefix.offload_for(len(part))
            self.paged.run([(sequence, part)])
        self.prefix.keep(sequence)
        return cached

    @property
    def num_slots(self):
        return self.prefix.idle_slots + self.pool.num_kept_slots


def test_finished_sequences_are_found_where_they_are_and_copied_nowhere():
    talk = Conversations()
    for number in range(5):
        assert talk.answer(tokens_of(number)) == 0
    assert talk.pool.num_kept_slots == 0 and talk.prefix.idle_slots == 5 * LENGTH
    for number in range(5):
        assert talk.answer([*tokens_of(number), 7, 8]) == LENGTH
    assert talk.pool.num_kept_slots == 0 and talk.prefix.idle_slots == 5 * (LENGTH + 2)
    assert talk.cache.slots.num_active == 0
    talk.paged.check(talk.prefix.idle_sequences())


def test_a_prefix_of_an_idle_sequence_is_shared():
    talk = Conversations()
    talk.answer(tokens_of(1, 100))
    assert talk.answer([*tokens_of(1, 17), 9, 9, 9]) == 17
    assert talk.answer(tokens_of(1, 101)) == 100
    talk.paged.check(talk.prefix.idle_sequences())


def test_the_oldest_leave_for_the_pool_when_their_slots_are_needed():
    talk = Conversations(num_slots=64)
    for number in range(4):
        talk.answer(tokens_of(number))
    assert talk.pool.num_kept_slots == LENGTH
    assert talk.pool.longest(tokens_of(0))[1] == LENGTH
    assert talk.answer([*tokens_of(0), 5]) == LENGTH, "it is copied back, and another leaves"
    assert talk.pool.longest(tokens_of(1))[1] == LENGTH and talk.pool.longest(tokens_of(0))[1] == 0
    talk.paged.check(talk.prefix.idle_sequences())


def test_all_together_have_no_more_slots_than_the_pool_may_have():
    talk = Conversations(num_slots=256, pool_slots=3 * LENGTH)
    for number in range(9):
        talk.answer(tokens_of(number))
        assert talk.num_slots <= 3 * LENGTH
    assert [number for number in range(9) if talk.prefix.find(tokens_of(number), ())] == [6, 7, 8]


def test_without_a_pool_the_last_sequence_stays():
    talk = Conversations(pool_slots=0)
    talk.answer(tokens_of(1))
    talk.answer(tokens_of(2))
    assert talk.prefix.idle_slots == LENGTH
    assert talk.answer([*tokens_of(2), 3]) == LENGTH


def test_a_claimed_conversation_leaves_last_and_its_share_is_half():
    talk = Conversations(pool_slots=4 * LENGTH)
    for number in range(3):
        talk.answer(tokens_of(number))
        talk.pool.claim(f"session {number}", tokens_of(number))
    for number in range(3, 9):
        talk.answer(tokens_of(number))
    kept = [number for number in range(9) if talk.prefix.find(tokens_of(number), ())]
    assert kept == [1, 2, 7, 8]


def test_a_claimed_conversation_of_the_pool_outlives_others_in_pages():
    talk = Conversations(num_slots=256, pool_slots=4 * LENGTH)
    kept = talk.cache.open()
    talk.paged.run([(kept, tokens_of(0))])
    talk.prefix.restore(talk.cache.copy_out(kept))
    talk.cache.close(kept)
    talk.pool.claim("snapshot", tokens_of(0))
    for number in range(1, 8):
        talk.answer(tokens_of(number))
        assert talk.num_slots <= 4 * LENGTH
    assert talk.pool.longest(tokens_of(0))[1] == LENGTH
    talk.pool.claim("one", tokens_of(6))
    talk.pool.claim("two", tokens_of(7))
    talk.answer(tokens_of(8, 3 * LENGTH))
    assert talk.num_slots <= 4 * LENGTH


@pytest.mark.skipif(sys.platform != "linux", reason="the arena is no mapping elsewhere")
def test_memory_of_pages_that_were_freed_is_given_back_and_the_others_keep_theirs():
    talk = Conversations(num_slots=1 << 14, pool_slots=1 << 14)
    one, two = talk.cache.open(), talk.cache.open()
    bytes_per_page = talk.cache.arena.state_view(0)[0].nbytes
    length = 3 * PAGE * (mmap.PAGESIZE // bytes_per_page)  # three pages of memory, at least two of them whole
    for start in range(0, length, 64):
        talk.paged.run([(one, list(range(start, min(start + 64, length))))])
    talk.paged.run([(two, tokens_of(2))])
    slots = one.slots.copy()
    talk.cache.close(one)
    talk.cache.give_back()
    rows = talk.cache.arena.host_memory(length)
    talk.cache.arena.read(slots, rows, slice(0, length))
    is_zero = np.array([(array == 0).all(axis=(0, 1, 3)) for array in rows]).all(axis=0)
    assert is_zero.sum() >= length // 3, "no page was given back"
    talk.paged.check([two])
    talk.paged.run([(two, [5, 6])])
    talk.paged.check([two])


@pytest.mark.parametrize("seed", range(examples(12)))
def test_random_conversations_keep_every_token(seed):
    """Prompts that begin like others, slots that end, a pool that ends, claims and memory given back, in any order."""
    rng = np.random.default_rng(seed)
    talk = Conversations(num_slots=192, pool_slots=int(rng.integers(0, 300)))
    known = [tokens_of(number, int(rng.integers(2, 60))) for number in range(4)]
    for _ in range(150):
        base = known[rng.integers(len(known))]
        tokens = [*base[: rng.integers(1, len(base) + 1)], *rng.integers(1, 99, rng.integers(0, 30)).tolist()][:180]
        talk.answer(tokens)
        known[rng.integers(len(known))] = tokens
        if rng.random() < 0.2:
            talk.pool.claim(str(rng.integers(3)), tokens)
        if rng.random() < 0.3:
            talk.cache.give_back()
        idle = talk.prefix.idle_sequences()
        talk.paged.check(idle)
        assert talk.num_slots <= talk.pool.num_slots or len(idle) == 1
        for stored in filter(None, (talk.pool.longest(tokens)[0] for tokens in known)):
            assert all((array == stored.ids[None, None, :, None]).all() for array in stored.kv)

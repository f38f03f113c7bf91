"""Tests that conversations which sessions have claimed are dropped after the others, within half of the pool."""

from __future__ import annotations

import numpy as np
import pytest

from staticllm.kvcache.host_pool import MAX_CLAIMS, HostPool
from staticllm.kvcache.sequence import PLAIN, Conditions
from staticllm.kvcache.stored import StoredSequence


def conversation(number, length=10, conditions=PLAIN):
    tokens = tuple(1000 * number + position for position in range(length))
    return StoredSequence(tokens, (np.zeros((1, 1, length, 1), np.float32),), (), conditions)


def kept(pool, number, conditions=PLAIN):
    return pool.longest(conversation(number).tokens, conditions=conditions)[1]


def test_without_claims_the_oldest_is_dropped():
    pool = HostPool(40)
    for number in range(5):
        pool.keep(conversation(number))
    assert [bool(kept(pool, number)) for number in range(5)] == [False, True, True, True, True]


def test_a_claimed_conversation_outlives_others():
    pool = HostPool(40)
    pool.keep(conversation(0))
    pool.claim("talk", conversation(0).tokens)
    for number in range(1, 20):
        pool.keep(conversation(number))
    assert kept(pool, 0) == 10 and kept(pool, 19) == 10
    assert pool.num_kept_slots == 40


def test_a_claim_holds_for_a_conversation_that_was_cut_or_went_on():
    pool = HostPool(40)
    pool.keep(conversation(0, 10))
    pool.claim("talk", [*conversation(0).tokens[:8], 5, 6, 7])
    for number in range(1, 9):
        pool.keep(conversation(number))
    assert kept(pool, 0) == 10
    pool.claim("talk", conversation(8).tokens)
    for number in range(9, 20):
        pool.keep(conversation(number))
    assert not kept(pool, 0) and kept(pool, 8) == 10, "a session has one conversation"


def test_claims_take_at_most_half_of_the_pool_and_the_newest_win():
    pool = HostPool(40)
    for number in range(4):
        pool.keep(conversation(number))
        pool.claim(f"talk {number}", conversation(number).tokens)
    for number in range(4, 10):
        pool.keep(conversation(number))
    assert [number for number in range(10) if kept(pool, number)] == [2, 3, 8, 9]


def test_other_adapters_are_other_conversations():
    pool = HostPool(20)
    pool.keep(conversation(0, conditions=Conditions((1.0,))))
    pool.claim("talk", conversation(0).tokens, conditions=Conditions((0.5,)))
    for number in (1, 2):
        pool.keep(conversation(number))
    assert not kept(pool, 0, conditions=Conditions((1.0,)))


def test_swapped_requests_come_before_claims():
    pool = HostPool(20)
    pool.keep(conversation(0))
    pool.claim("talk", conversation(0).tokens)
    pool.swap_out(1, conversation(1))
    pool.swap_out(2, conversation(2))
    assert not kept(pool, 0) and pool.num_kept_slots == 0


@pytest.mark.parametrize("count", [MAX_CLAIMS, MAX_CLAIMS + 1])
def test_the_number_of_claims_is_bounded(count):
    pool = HostPool(1000)
    pool.keep(conversation(0))
    for number in range(count):
        pool.claim(f"talk {number}", conversation(number + 1000 if number else 0).tokens)
    for number in range(1, 220):
        pool.keep(conversation(number))
    assert bool(kept(pool, 0)) == (count == MAX_CLAIMS)


@pytest.mark.parametrize("count", [3, MAX_CLAIMS + 9])
def test_the_sessions_of_one_owner_leave_others_their_claims(count):
    pool = HostPool(40)
    pool.keep(conversation(0))
    pool.claim("talk", conversation(0).tokens, owner="quiet")
    for number in range(1, count + 1):
        pool.keep(conversation(number))
        pool.claim(f"talk {number}", conversation(number).tokens, owner="busy")
    for number in range(count + 1, count + 9):
        pool.keep(conversation(number))
    claimed = [number for number in range(count + 1) if kept(pool, number)]
    assert claimed == [0, count], "the newest of each"


def test_owners_may_give_their_sessions_the_same_name():
    pool = HostPool(40)
    for number, owner in enumerate(("first", "second")):
        pool.keep(conversation(number))
        pool.claim("talk", conversation(number).tokens, owner=owner)
    for number in range(2, 9):
        pool.keep(conversation(number))
    assert kept(pool, 0)
    assert kept(pool, 1)


def test_the_claims_of_an_owner_are_dropped_together():
    pool = HostPool(40)
    for number, owner in enumerate(("gone", "there")):
        pool.keep(conversation(number))
        pool.claim("talk", conversation(number).tokens, owner=owner)
    pool.drop_claims("gone")
    assert kept(pool, 0) == 10, "it is kept as long as there is room"
    for number in range(2, 9):
        pool.keep(conversation(number))
    assert not kept(pool, 0)
    assert kept(pool, 1) == 10

"""Tests that the host's work per step grows with the sequences of the step, and that none of them waits for a search.

Calls of functions are counted, not seconds. Sequences that share their slots did work that grew with the square or the cube of
their number.
"""

import itertools
import sys

import numpy as np
import pytest
from support.engine.beam_steps import beam_request

from staticllm.core import Variant
from staticllm.kvcache import host_pool, prefix
from staticllm.kvcache.sequence import common_prefix
from staticllm.kvcache.slot_allocator import SlotAllocator
from staticllm.pipelines.engine.client_sequences.sequence import ClientSequence, Feed
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.testing import assert_empty, fake_engine, fake_request, run_to_end, run_until

PROMPT = list(range(60))
KV_LENS = (128, 1024, 8192)
VARIANTS = (
    *(Variant(rows, kv_len, rows) for rows in (1, 4, 16) for kv_len in KV_LENS),
    *(Variant(rows, kv_len, sequences) for rows in (32, 64) for kv_len in (0, *KV_LENS) for sequences in (1, 16)),
)


def engine_of(max_num_seqs=16, policy="dynamic", variants=VARIANTS, **options):
    return fake_engine(make_policy(policy), max_num_seqs, variants, 128, starts_thread=False, **options)


class Fed:
    """``count`` client sequences that have run the same prompt, or one each."""

    def __init__(self, engine, count, is_shared):
        self.engine = engine
        if is_shared:
            first = ClientSequence(engine)
            self.feed([first], PROMPT)
            self.sequences = [first, *(first.fork() for _ in range(count - 1))]
        else:
            self.sequences = [ClientSequence(engine) for _ in range(count)]
            for index, sequence in enumerate(self.sequences):
                self.feed([sequence], [index, *PROMPT])

    def feed(self, sequences, tokens):
        results = []
        self.engine.feed([Feed(sequence, tokens, results.append, "last") for sequence in sequences])
        while len(results) < len(sequences):
            self.engine.steps.step()
        assert all(result.error is None for result in results)

    def step(self):
        self.feed(self.sequences, [7])


def num_calls(function):
    """Return the number of calls of functions, of Python and of C, that ``function`` makes."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def num_slots_seen(monkeypatch, function):
    """Return how many slots the allocator was asked about while ``function`` ran."""
    count = 0

    def watched(method):
        def call(self, *given):
            nonlocal count
            for slots in given[0] if isinstance(given[0], list) else given:
                count += np.size(slots)
            return method(self, *given)

        return call

    with monkeypatch.context() as patch:
        for name in ("share", "free", "mark_idle", "mark_active", "count_own", "count_freed", "count_only"):
            patch.setattr(SlotAllocator, name, watched(getattr(SlotAllocator, name)))
        function()
    return count


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_step_of_fed_sequences_costs_as_many_times_more_as_there_are_more_of_them(is_shared):
    """Four times as many need four calls instead of one, each with a view of all: so a little more than four times."""
    counts = {}
    for count in (16, 64):
        fed = Fed(engine_of(64), count, is_shared)
        fed.step()
        counts[count] = num_calls(fed.step)
    assert counts[64] < 5.5 * counts[16]


def test_a_step_looks_at_the_slots_of_each_sequence_a_few_times(monkeypatch):
    for count in (4, 16, 64):
        fed = Fed(engine_of(64), count, is_shared=True)
        fed.step()
        assert num_slots_seen(monkeypatch, fed.step) < 5 * count * (len(PROMPT) + 2)


def test_sequences_on_a_shared_prompt_cost_no_more_than_apart():
    shared, apart = (Fed(engine_of(), 16, is_shared) for is_shared in (True, False))
    counts = []
    for fed in (shared, apart):
        fed.step()
        counts.append(num_calls(fed.step))
    assert counts[0] < 1.1 * counts[1]


@pytest.mark.parametrize("groups", [1, 4])
def test_a_search_costs_as_many_times_more_as_it_has_more_beams(groups):
    counts = {}
    for num_beams in (16, 64):
        request = beam_request(PROMPT, 8, num_beams, 1, num_beam_groups=groups, diversity_penalty=float(groups > 1))
        counts[num_beams] = num_calls(lambda request=request: run_to_end(engine_of(64), [request]))
    assert counts[64] < 4.4 * counts[16]


def test_fed_sequences_without_enough_slots_compare_few_tokens(monkeypatch):
    """Those that are idle lose their slots to the others, come back, and find their tokens in the host pool."""
    compared = []
    for module in (prefix, host_pool):
        monkeypatch.setattr(module, "common_prefix", lambda *tokens: compared.append(1) or common_prefix(*tokens))
    variants = [variant for variant in VARIANTS if variant.kv_len <= 1024]
    for count in (24, 48):
        fed = Fed(engine_of(variants=variants, host_kv_slots=1 << 14), count, is_shared=False)
        fed.step()
        compared.clear()
        fed.step()
        assert 0 < len(compared) < 4 * count


POOLS_AND_GAPS = (((0, None), (1 << 14, 500.0)), ((0, 500.0), (1 << 14, None)))
"""Host slots and bounds of gaps: each number of sequences has both of each, and in turns all of their pairs."""


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(
    ("max_num_seqs", "is_first", "host_kv_slots", "gap_ms"),
    [
        (count, is_first, *each)
        for place, count in enumerate((2, 16, 64))
        for is_first in (True, False)
        for each in POOLS_AND_GAPS[(place + is_first) % 2]
    ],
)
def test_a_stream_has_a_token_every_few_steps_beside_a_search(policy, max_num_seqs, is_first, host_kv_slots, gap_ms):
    """Also if the search began before it. Its beams had all places until its end, one after another."""
    if policy == "decode_first" and not is_first:
        pytest.skip("prompts run only in rows that would be padding, and beams fill them")
    engine = engine_of(max_num_seqs, policy, host_kv_slots=host_kv_slots, gap_ms=gap_ms)
    ticks = itertools.count()
    engine.core.clock = lambda: next(ticks) * 1e-4  # the time slices of a busy machine would be shorter than steps
    stream, search = fake_request(range(100, 110), 60), beam_request(PROMPT, 12, 64, 1)
    first, second = (stream, search) if is_first else (search, stream)
    engine.steps.add([first])
    for _ in range(8):
        engine.steps.step()
    engine.steps.add([second])
    seen, gaps = stream.num_generated, [0]  # gaps in steps: before the first token, and between two
    while search.request.id in {*engine.core.requests, *engine.steps.inbox} and seen < 60:
        engine.steps.step()
        gaps[-1] += 1
        if stream.num_generated > seen:
            gaps.append(0)
            seen = stream.num_generated
    assert seen > 8
    assert gaps[0] <= 12
    assert max(gaps[1:]) <= 4
    run_to_end(engine)
    assert_empty(engine)


def test_prompts_of_fed_sequences_run_although_all_places_are_taken():
    """They need no place afterwards."""
    engine = engine_of(2, "prefill_first", host_kv_slots=0)
    streams = [fake_request(range(start, start + 9), 60) for start in (200, 300)]
    run_until(engine, lambda: all(stream.num_generated > 3 for stream in streams), streams)
    fed = Fed(engine, 1, is_shared=True)
    assert fed.sequences[0].length == len(PROMPT)
    assert not any(stream.num_generated == 60 for stream in streams)

"""Tests the KV cache manager: prefix reuse, offloading to the host pool, and prompts that bypass the arena."""

from __future__ import annotations

import time

import pytest
from support.engine.output_queues import reason_of

from staticllm.core import Variant
from staticllm.kvcache import prefix
from staticllm.kvcache.cache import SequenceCopy
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.testing import FakeProgram, assert_empty, fake_answer, fake_engine, fake_request, run_to_end, run_until

MANY_CHUNKS = [
    *(Variant(rows, kv_len, rows) for rows in (1, 2, 4) for kv_len in (32, 64, 128, 192)),
    *(Variant(rows, kv_len, count) for rows in (8, 16) for kv_len in (0, 32, 64, 128, 192) for count in (1, 6)),
]


def test_a_shared_prefix_is_stored_once_and_counted_as_cached():
    engine, system = fake_engine(make_policy("fcfs")), list(range(24))
    requests = [fake_request([*system, 500 + i], 30) for i in range(3)]
    run_until(engine, lambda: all(request.num_generated for request in requests), requests)
    assert engine.runner.cache.slots.num_shared == 24
    assert engine.runner.cache.slots.num_used < 24 + 3 * 31
    assert [request.num_cached for request in requests] == [0, 24, 24]
    run_to_end(engine, [])
    assert [request.tokens for request in requests] == [fake_answer([*system, 500 + i], 30) for i in range(3)]
    assert engine.core.profiler.stats().prefix_hit_tokens == 48


def test_a_conversation_is_reused_after_other_conversations():
    engine = fake_engine(make_policy("dynamic"))
    first = fake_request(range(20), 10)
    run_to_end(engine, [first])
    run_to_end(engine, [fake_request(range(200, 240), 10), fake_request(range(400, 430), 10)])
    again = fake_request([*first.tokens, 7, 8], 5)
    expected = fake_answer(again.tokens, 5)
    run_to_end(engine, [again])
    assert again.num_cached == 29
    assert again.tokens == expected


@pytest.mark.parametrize("is_hurried", [False, True])
def test_a_long_conversation_is_offloaded_in_chunks(monkeypatch, is_hurried):
    """While a request decodes, one chunk is copied per call, unless a request needs all of the slots."""
    engine, pieces, advance = fake_engine(make_policy("fcfs"), max_num_seqs=2), [], SequenceCopy.advance
    monkeypatch.setattr(prefix, "OFFLOAD_SLOTS", 8)
    monkeypatch.setattr(SequenceCopy, "advance", lambda self, count: pieces.append(count) or advance(self, count))
    long, reader = fake_request(range(48), 3), fake_request(range(200, 206), 30)
    expected = fake_answer(reader.tokens, 30)
    run_until(engine, lambda: pieces, [long, reader])
    kv_manager, cache = engine.core.device.kv_manager, engine.runner.cache
    assert engine.is_idle is False
    assert kv_manager.prefix.idle_slots == 50
    assert kv_manager.host_pool.num_kept_slots == 0
    if is_hurried:
        kv_manager.make_room(cache.num_slots - cache.slots.num_used + 1)
        assert kv_manager.prefix.idle_slots == 0
        assert cache.slots.num_used == len(reader.state.kv.sequence)
    run_to_end(engine, [])
    assert reader.tokens == expected
    assert pieces.count(8) == (1 if is_hurried else 7)
    assert kv_manager.host_pool.num_kept_slots == 50
    again = fake_request([*long.tokens, 7, 8], 5)
    answer = fake_answer(again.tokens, 5)
    run_to_end(engine, [again])
    assert again.num_cached == 50
    assert again.tokens == answer
    assert_empty(engine)


def test_offloading_copies_while_the_device_runs(monkeypatch):
    running, copied, run, advance = [], [], FakeProgram.run, SequenceCopy.advance

    def ran(self, meanwhile=None):
        def watched():
            running.append(True)
            meanwhile()
            running.pop()

        return run(self, watched)

    monkeypatch.setattr(prefix, "OFFLOAD_SLOTS", 8)
    monkeypatch.setattr(FakeProgram, "run", ran)
    monkeypatch.setattr(
        SequenceCopy, "advance", lambda self, count: copied.append(bool(running)) or advance(self, count)
    )
    engine = fake_engine(make_policy("fcfs"), max_num_seqs=2)
    run_to_end(engine, [fake_request(range(48), 3), fake_request(range(200, 206), 30)])
    assert len(copied) == 8, "seven chunks, and a last call that returns True"
    assert all(copied), "chunks are copied only while the device runs"


@pytest.mark.parametrize("is_resting", [False, True])
def test_slots_are_freed_after_a_failed_offload(is_resting, monkeypatch):
    """A failed copy ends the requests of the running call, or none if the device is idle; all slots are freed."""
    monkeypatch.setattr(prefix, "OFFLOAD_SLOTS", 30)
    engine = fake_engine(make_policy("fcfs"), max_num_seqs=2)
    first, second = fake_request(range(40), 3), fake_request(range(200, 206), 3 if is_resting else 30)
    run_until(engine, lambda: engine.core.device.kv_manager.prefix.is_offloading, [first, second])
    assert engine.is_idle == is_resting
    slots, free, failed = engine.runner.cache.slots, engine.runner.cache.slots.free, []

    def fail_once(given):
        if not failed:
            failed.append(True)
            raise MemoryError("none left")
        free(given)

    monkeypatch.setattr(slots, "free", fail_once)
    engine.steps.step()
    assert failed
    monkeypatch.undo()
    run_to_end(engine, [])
    assert reason_of(first) == "length"
    assert reason_of(second) == ("length" if is_resting else "error")
    assert engine.runner.cache.slots.num_used == engine.core.device.kv_manager.prefix.idle_slots == 0
    again = fake_request(range(30), 5)
    expected = fake_answer(again.tokens, 5)
    run_to_end(engine, [again])
    assert again.tokens == expected
    assert_empty(engine)


def test_an_idle_engine_offloads_and_compacts(monkeypatch):
    monkeypatch.setattr(prefix, "OFFLOAD_SLOTS", 8)
    engine = fake_engine(make_policy("dynamic"))
    requests = [fake_request(range(start, start + 20), 5) for start in (0, 100, 200)]
    for request in requests:
        engine.submit_state(request)
    until = time.monotonic() + 20
    while (
        engine.run_between_steps(lambda: engine.core.device.kv_manager.host_pool.num_kept_slots) < 48
        and time.monotonic() < until
    ):
        time.sleep(0.005)
    assert engine.run_between_steps(
        lambda: (engine.core.device.kv_manager.prefix.idle_slots, engine.core.device.kv_manager.prefix.is_offloading)
    ) == (
        24,
        False,
    )
    engine.close()


def test_offloading_is_not_chunked_when_no_request_decodes(monkeypatch):
    """Otherwise each chunk of the prompt would see all slots of the previous conversation."""
    monkeypatch.setattr(prefix, "OFFLOAD_SLOTS", 4)
    engine = fake_engine(make_policy("fcfs"))
    run_to_end(engine, [fake_request(range(48), 3)])
    request = fake_request(range(200, 230), 3)
    engine.steps.add([request])
    engine.steps.step()
    engine.steps.step()
    assert engine.core.device.kv_manager.table[request.id].num_computed
    assert engine.runner.cache.slots.num_used <= 30
    assert engine.core.device.kv_manager.host_pool.num_kept_slots == 50
    assert not engine.core.device.kv_manager.prefix.is_offloading


@pytest.mark.parametrize("num_tokens", [30, 60])
def test_a_prompt_of_several_chunks_sees_no_slot_of_the_last_conversation(num_tokens, monkeypatch):
    """The conversation leaves while the first chunk runs, which sees no slots, and the others fill its place."""
    monkeypatch.setattr(prefix, "OFFLOAD_SLOTS", 4)
    engine, kv_lens = fake_engine(make_policy("fcfs")), []
    run_to_end(engine, [fake_request(range(48), 3)])
    request = fake_request(range(200, 200 + num_tokens), 3)
    expected, run = fake_answer(request.tokens, 3), engine.runner.run
    monkeypatch.setattr(
        engine.runner,
        "run",
        lambda variant, *args: kv_lens.append((variant.rows, variant.kv_len)) or run(variant, *args),
    )
    run_to_end(engine, [request])
    assert request.tokens == expected
    chunks = [kv_len for rows, kv_len in kv_lens if rows > 1]
    assert chunks[0] == 0
    assert len(chunks) > 1
    assert max(chunks) <= engine.runner.cache.kv_len_for(num_tokens)
    assert engine.core.device.kv_manager.host_pool.num_kept_slots == 50
    assert_empty(engine)


@pytest.mark.parametrize("policy", ["dynamic", "chunked"])
@pytest.mark.parametrize("host_kv_slots", [0, 64, 256])
def test_a_conversation_that_the_host_pool_cannot_hold_stays_for_a_request_that_continues_it(host_kv_slots, policy):
    engine = fake_engine(make_policy(policy), variants=MANY_CHUNKS, max_seq_len=96, host_kv_slots=host_kv_slots)
    first = fake_request(range(70), 5)
    run_to_end(engine, [first])
    other, again = fake_request(range(300, 320), 3), fake_request([*first.tokens, 7, 8, 9], 3)
    expected = fake_answer(again.tokens, 3)
    run_to_end(engine, [other, again])
    assert again.num_cached == 74
    assert again.tokens == expected


def test_the_last_conversation_stays_beside_a_prompt_of_one_chunk():
    engine = fake_engine(make_policy("fcfs"))
    run_to_end(engine, [fake_request(range(20), 3)])
    engine.steps.add([fake_request(range(200, 210), 3)])
    engine.steps.step()
    assert engine.core.device.kv_manager.prefix.idle_slots == 22
    assert not engine.core.device.kv_manager.prefix.is_offloading


def test_a_request_that_continues_an_outgoing_conversation_shares_its_slots(monkeypatch):
    monkeypatch.setattr(prefix, "OFFLOAD_SLOTS", 4)
    engine = fake_engine(make_policy("chunked"), max_num_seqs=2)
    long, reader = fake_request(range(30), 3), fake_request(range(200, 206), 40)
    answers = [fake_answer(request.tokens, count) for request, count in ((long, 3), (reader, 40))]
    run_until(engine, lambda: engine.core.device.kv_manager.prefix.is_offloading, [long, reader])
    again = fake_request([*long.tokens, 7, 8], 20)
    answers.append(fake_answer(again.tokens, 20))
    engine.steps.add([again])
    engine.steps.step()
    assert again.num_cached == 32
    assert engine.runner.cache.slots.num_shared == 32
    assert engine.core.device.kv_manager.prefix.idle_slots == 0
    run_to_end(engine, [])
    assert [request.tokens for request in (long, reader, again)] == answers
    assert_empty(engine)


def test_a_prompt_beyond_max_num_seqs_never_enters_the_arena(monkeypatch):
    engine = fake_engine(make_policy("prefill_first"), max_num_seqs=1)
    first = fake_request([1, 2, 3], 20)
    run_until(engine, lambda: first.num_generated, [first])
    kv_len, num_used = engine.runner.cache.arena.stride, engine.runner.cache.slots.num_used
    waiting = [fake_request(range(20 * i, 20 * i + 14), 6) for i in range(3)]
    expected = [fake_answer(request.tokens, 6) for request in waiting]
    engine.steps.add(waiting)
    monkeypatch.setattr(engine.runner.cache, "copy_out", lambda *_: pytest.fail("slots were copied out of the arena"))
    run_until(engine, lambda: all(request.num_generated for request in waiting))
    monkeypatch.undo()
    cache = engine.runner.cache
    assert cache.arena.stride == kv_len
    assert cache.slots.num_used <= num_used + first.num_generated
    assert engine.core.device.kv_manager.host_pool.num_swapped_slots == 3 * 14
    run_to_end(engine, [])
    assert [request.tokens for request in waiting] == expected
    assert_empty(engine)


def test_a_cached_prefix_continues_if_only_single_rows_have_programs_with_a_past():
    engine = fake_engine(make_policy("fcfs"), variants=[*(Variant(1, c) for c in (32, 64, 128)), Variant(16, 0)])
    first = fake_request(range(16), 10)
    run_to_end(engine, [first])
    second = fake_request([*first.tokens, 7, 8, 9], 5)
    expected = fake_answer(second.tokens, 5)
    run_to_end(engine, [second])
    assert second.tokens == expected
    assert second.num_cached == 25


def test_slots_shared_with_a_cached_sequence_count_as_those_of_the_request():
    """The cached sequence is evicted when slots are needed. Plans were illegal when only the request's own slots counted."""
    variants = [Variant(1, 128), Variant(2, 128, 2), Variant(16, 0), Variant(16, 128)]
    engine = fake_engine(make_policy("fcfs"), variants=variants, max_seq_len=128)
    run_to_end(engine, [fake_request(range(100), 2)])
    request = fake_request([*range(25), 500, 501], 9)
    run_until(engine, lambda: request.num_generated > 2, [request])
    manager, slots = engine.core.device.kv_manager, engine.runner.cache.slots
    assert slots.num_shared == 25, "it is shared with the cached sequence, and not cut"
    (info,) = (state.info for state in manager.states.values())
    assert manager.free_slots + info.own_slots == slots.num_slots
    run_to_end(engine, [])
    assert_empty(engine)

"""Tests recurrent states on the fake device: no idle row changes them, and they move with their sequence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.core import Variant
from staticllm.kvcache.host_pool import HostPool
from staticllm.kvcache.snapshot import load, save
from staticllm.kvcache.stored import StoredSequence
from staticllm.pipelines.engine.overflow import shorten
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.testing import (
    FAKE_VARIANTS,
    fake_answer,
    fake_engine,
    fake_next_token,
    fake_request,
    fake_runner,
    fake_shape,
    run_to_end,
)

VARIANTS = [Variant(rows, kv_len) for rows in (1, 4, 16) for kv_len in (0, 16, 64) if rows > 1 or kv_len]
ALONE = [variant for variant in FAKE_VARIANTS if variant.sequences == 1]


def said(logits, sequence):
    assert int(logits.argmax()) == fake_next_token(sequence.tokens, is_recurrent=True)


def new_engine(**options):
    return fake_engine(make_policy("dynamic"), variants=ALONE, is_recurrent=True, **options)


@given(st.integers(1, 50), st.integers(1, 5))
def test_prompts_run_in_calls_without_idle_rows(length, count):
    runner = fake_runner(VARIANTS, is_recurrent=True)
    sequence = runner.cache.open()
    said(runner.prefill(sequence, range(length)), sequence)
    for token in range(count):
        said(runner.decode(sequence, token), sequence)


moves = st.lists(
    st.tuples(st.sampled_from(["run", "fork", "close", "swap_out"]), st.integers(0, 3), st.integers(1, 6)), max_size=30
)


@given(moves)
def test_a_moved_sequence_keeps_its_states(schedule):
    runner = fake_runner(VARIANTS, is_recurrent=True)
    cache = runner.cache
    sequences = [cache.open() for _ in range(4)]
    for move, index, number in schedule:
        sequence = sequences[index]
        if move == "run" and cache.slots.num_free >= number:
            said(runner.prefill(sequence, range(7 * index, 7 * index + number)), sequence)
        elif move == "fork" and number % 4 != index:
            cache.close(sequence)
            sequences[index] = cache.fork(sequences[number % 4], len(sequences[number % 4]))
        elif move == "close":
            cache.close(sequence)
        elif move == "swap_out" and len(sequence):
            stored = cache.copy_out(sequence)
            cache.close(sequence)
            sequences[index] = cache.bring_back(stored, len(stored.tokens))


def test_a_cut_sequence_with_states_becomes_empty():
    runner = fake_runner(VARIANTS, is_recurrent=True)
    sequence = runner.cache.open()
    runner.prefill(sequence, range(20))
    runner.cache.cut(sequence, 10)
    assert len(sequence) == 0
    assert runner.cache.slots.num_used == 0
    said(runner.prefill(sequence, range(5)), sequence)


def test_a_failed_step_leaves_the_states_as_they_were(monkeypatch):
    runner = fake_runner(VARIANTS, is_recurrent=True)
    sequence = runner.cache.open()
    runner.prefill(sequence, range(9))
    program = runner.programs[Variant(1, 16)]

    def fail(meanwhile):
        runner.cache.states.present[0][:] = -1
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(program, "run", fail)
        with pytest.raises(RuntimeError):
            runner.decode(sequence, 3)
    said(runner.decode(sequence, 3), sequence)


def test_the_next_turn_runs_only_its_new_tokens():
    engine = new_engine()
    first = fake_request(range(20), 5)
    run_to_end(engine, [first])
    again = fake_request([*first.tokens, 7, 8], 3)
    run_to_end(engine, [again])
    assert again.num_cached == 24, "all but the last token of the answer, which never ran"
    assert again.tokens == fake_answer([*first.tokens, 7, 8], 3, is_recurrent=True)


def test_a_prompt_that_diverges_earlier_is_recomputed():
    engine = new_engine()
    run_to_end(engine, [fake_request(range(20), 5)])
    other = fake_request([*range(15), 99, 98], 3)
    run_to_end(engine, [other])
    assert other.num_cached == 0
    assert other.tokens == fake_answer([*range(15), 99, 98], 3, is_recurrent=True)


def test_a_snapshot_holds_the_recurrent_states(tmp_path):
    engine = new_engine()
    first = fake_request(range(20), 5)
    run_to_end(engine, [first])
    save(engine.core.device.kv_manager.prefix.find(first.tokens, []), tmp_path / "snapshot", {"model": "fake"})
    stored = load(tmp_path / "snapshot", {"model": "fake"}, engine.runner.cache.layout, 100)
    assert len(stored.states) == 1
    assert stored.states[0].dtype == np.int64
    another = new_engine()
    another.core.device.kv_manager.prefix.restore(stored)
    request = fake_request([*first.tokens, 7], 3)
    run_to_end(another, [request])
    assert request.num_cached == 24
    assert request.tokens == fake_answer([*first.tokens, 7], 3, is_recurrent=True)


def test_a_full_conversation_continues():
    engine = new_engine(max_seq_len=32)
    request = fake_request(range(20), 40, overflow="shift")
    run_to_end(engine, [request])
    tokens = list(range(20))
    for _ in range(40):
        tokens = fake_answer(shorten(tokens, 16, "shift") if len(tokens) > 32 else tokens, 1, is_recurrent=True)
    assert request.tokens[-4:] == tokens[-4:]
    assert request.num_generated == 40


def test_a_prefix_shared_by_several_conversations_stays_cached():
    """A state cannot be cut, so the shorter conversation is not contained in the longer one."""
    engine = new_engine()
    run_to_end(engine, [fake_request(range(20), 1)])
    for other in range(3):
        request = fake_request([*range(20), 100 + other, 7], 2)
        run_to_end(engine, [request])
        assert request.num_cached == 20
        assert request.tokens == fake_answer([*range(20), 100 + other, 7], 2, is_recurrent=True)


def test_states_count_towards_the_size_of_the_host_pool():
    """Otherwise many short conversations with large states would fill the host's memory."""
    shape = fake_shape(is_recurrent=True)
    assert shape.slots_of_states(64) == 1
    assert fake_shape().slots_of_states(64) == 0
    host_pool = HostPool(100, state_slots=30)
    for index in range(10):
        host_pool.keep(StoredSequence((index,), (), (np.zeros((1, 1)),)))
    assert host_pool.num_kept_slots == 93
    assert host_pool.free_slots == 70


def test_a_prompt_is_cached_without_its_answer():
    """A repeated prompt, or one whose answer is tokenized differently, continues from the end of the cached prompt."""
    engine = new_engine()
    first = fake_request(range(20), 5)
    run_to_end(engine, [first])
    assert len(engine.core.device.kv_manager.prefix.find(range(20), []).tokens) == 20
    for rest in ([77, 78], [79]):
        again = fake_request([*range(20), *rest], 3)
        run_to_end(engine, [again])
        assert again.num_cached == 20
        assert again.tokens == fake_answer([*range(20), *rest], 3, is_recurrent=True)

"""Tests the runner on the fake device, which computes a checksum of all visible slots, for any chunks and KV lengths."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticllm.core import MaskKind, Variant
from staticllm.errors import NumericalError
from staticllm.kvcache.sequence import common_prefix
from staticllm.testing import fake_next_token, fake_runner

VARIANTS = [Variant(1, c) for c in (8, 16, 48)] + [Variant(r, c) for r in (4, 16) for c in (0, 48)]
MASKS = (MaskKind(), MaskKind(5))


def generate(runner, sequence, prompt, count):
    """Return greedy tokens, each checked against the plain computation."""
    logits, tokens = runner.prefill(sequence, prompt[len(sequence) :]), list(prompt)
    for _ in range(count):
        token = int(logits.argmax())
        assert token == fake_next_token(tokens, MASKS)
        tokens.append(token)
        logits = runner.decode(sequence, token)
    return tokens


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 996))
def test_generation_crosses_chunks_and_kv_lens(length, count, first):
    runner = fake_runner(VARIANTS, MASKS)
    generate(runner, runner.cache.open(), [(first + 31 * i) % 997 for i in range(length)], count)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=2, max_size=5))
def test_turns_may_keep_a_prefix(turns):
    runner = fake_runner(VARIANTS, MASKS)
    sequence, tokens = runner.cache.open(), [1]
    for keep, more in turns:
        prompt = [*tokens[:keep], *range(900, 900 + more)]
        runner.cache.cut(sequence, common_prefix(sequence.tokens, prompt[:-1]))
        tokens = generate(runner, sequence, prompt, 4)


def test_a_new_conversation_moves_no_slots(monkeypatch):
    runner = fake_runner(VARIANTS)
    sequence = runner.cache.open()
    generate_plain = [int(runner.prefill(sequence, list(range(20))).argmax())]
    runner.decode(sequence, generate_plain[0])
    runner.cache.close(sequence)
    monkeypatch.setattr("staticllm.kvcache.arena.restride", lambda *_: pytest.fail("rows were moved"))
    sequence = runner.cache.open()
    logits = runner.prefill(sequence, [3, 4, 5])
    runner.decode(sequence, int(logits.argmax()))


def test_no_slot_is_copied_between_prefill_and_decode(monkeypatch):
    monkeypatch.setattr("staticllm.kvcache.arena.restride", lambda *_: pytest.fail("rows were moved"))
    for length in (1, 3, 15):  # one chunk, with room for the next token in the same KV length
        runner = fake_runner(VARIANTS)
        sequence = runner.cache.open()
        runner.decode(sequence, int(runner.prefill(sequence, list(range(length))).argmax()))


def test_non_finite_results_are_refused_and_take_no_slot(monkeypatch):
    runner = fake_runner(VARIANTS)
    sequence = runner.cache.open()
    program = runner.programs[Variant(4, 0)]
    monkeypatch.setattr(program, "run", lambda meanwhile: program.buffers.logits.fill(float("nan")) or 0.0)
    with pytest.raises(NumericalError, match="not finite"):
        runner.prefill(sequence, [1, 2, 3])
    monkeypatch.undo()
    assert runner.cache.slots.num_used == 0
    assert int(runner.prefill(sequence, [1, 2, 3]).argmax()) == fake_next_token([1, 2, 3])


def test_an_interrupted_commit_is_undone_by_reset(monkeypatch):
    runner = fake_runner(VARIANTS)
    sequence = runner.cache.open()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.cache.arena, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.prefill(sequence, [1, 2, 3])
    monkeypatch.undo()
    sequence = runner.reset()
    assert runner.cache.slots.num_used == 0
    assert int(runner.prefill(sequence, [1, 2, 3]).argmax()) == fake_next_token([1, 2, 3])

"""Tests several sequences in one step, with shared prefixes, on the fake device: each gets the answer of a single run."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples

from staticllm.core import MaskKind, Variant
from staticllm.kvcache.step import Segment
from staticllm.testing import fake_next_token, fake_runner

MASKS = (MaskKind(), MaskKind(6))
VARIANTS = [Variant(r, c, min(r, 4)) for r in (1, 4, 16) for c in (16, 64)] + [Variant(16, 0, 4)]


def new_runner():
    return fake_runner([*VARIANTS, *(Variant(16, c) for c in (0, 16, 64))], MASKS)


moves = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=4)),
        st.tuples(st.just("fork"), st.integers(0, 3), st.integers(0, 3), st.integers(0, 20)),
        st.tuples(st.just("cut"), st.integers(0, 3), st.integers(0, 20)),
    ),
    max_size=30,
)


@settings(max_examples=examples(200), deadline=None)
@given(moves)
def test_any_schedule_gives_every_sequence_its_own_answer(schedule):
    runner = new_runner()
    sequences = [runner.cache.open() for _ in range(4)]
    for move in schedule:
        if move[0] == "fork":
            _, source, target, length = move
            if source != target:
                runner.cache.close(sequences[target])
                sequences[target] = runner.cache.fork(sequences[source], min(length, len(sequences[source])))
        elif move[0] == "cut":
            runner.cache.cut(sequences[move[1]], min(move[2], len(sequences[move[1]])))
        else:
            parts = dict(move[1])
            if runner.cache.slots.num_free < sum(parts.values()):
                continue
            segments = [Segment(sequences[i], np.arange(7 * i, 7 * i + count)) for i, count in parts.items()]
            for segment, logits in zip(segments, runner.step(segments), strict=True):
                assert int(logits.argmax()) == fake_next_token(segment.sequence.tokens, MASKS)
    for sequence in sequences:
        runner.cache.close(sequence)
    assert runner.cache.slots.num_used == 0


def test_a_shared_prefix_is_stored_once():
    runner = new_runner()
    base = runner.cache.open()
    runner.prefill(base, list(range(10)))
    forks = [runner.cache.fork(base, 8) for _ in range(3)]
    assert runner.cache.slots.num_used == 10
    runner.cache.close(base)
    assert runner.cache.slots.num_used == 8, "what a fork still sees stays"
    for fork in forks:
        runner.cache.close(fork)
    assert runner.cache.slots.num_used == 0


def test_the_smallest_program_that_holds_the_step_runs():
    runner = new_runner()
    sequences = [runner.cache.open() for _ in range(3)]
    for sequence in sequences:
        runner.prefill(sequence, [1, 2])
    before = {variant: program.num_runs for variant, program in runner.programs.items()}
    runner.step([Segment(sequence, np.array([5])) for sequence in sequences])
    ran = [variant for variant, program in runner.programs.items() if program.num_runs > before[variant]]
    assert ran == [Variant(4, 16, 4)]


def test_a_decode_step_runs_in_one_row_at_any_measured_cost():
    """The first run packs the weights and looks expensive, so by cost sixteen rows would seem cheaper."""
    runner = new_runner()
    sequence = runner.cache.open()
    runner.prefill(sequence, [1, 2, 3])
    runner.costs.update(Variant(1, 16), 99.0)
    assert runner.variant_for([Segment(sequence, np.array([5]))]) == Variant(1, 16)

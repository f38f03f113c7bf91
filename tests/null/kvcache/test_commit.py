"""``commit``: what a step computed is kept as a whole, in part, or not at all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.core import Variant
from staticllm.kvcache.step import Segment, Step
from staticllm.testing import fake_next_token, fake_runner

VARIANTS = [Variant(16, 0, 4), Variant(16, 64, 4), Variant(1, 64)]


def run(runner, segments, accepted):
    """One call of which ``accepted`` tokens of each segment are kept."""
    variant = runner.variant_for(segments)
    program, step = runner.programs[variant], Step(variant, tuple(segments))
    runner.cache.fill(step, program.buffers)
    program.run()
    return runner.cache.commit(step, program.buffers, accepted)


@given(
    prompts=st.lists(st.lists(st.integers(0, 900), min_size=1, max_size=8), min_size=1, max_size=3),
    drafts=st.lists(st.lists(st.integers(0, 900), min_size=1, max_size=4), min_size=3, max_size=3),
    accepted=st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
def test_a_draft_that_is_accepted_in_part_leaves_nothing_of_the_rest(prompts, drafts, accepted):
    runner = fake_runner(VARIANTS)
    sequences = [runner.cache.open() for _ in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        runner.prefill(sequence, prompt)
    drafts = drafts[: len(prompts)]
    counts = [min(count, len(draft)) for count, draft in zip(accepted, drafts, strict=False)]
    run(runner, [Segment(s, np.array(d)) for s, d in zip(sequences, drafts, strict=True)], counts)
    assert runner.cache.slots.num_used == sum(map(len, prompts)) + sum(counts)
    for sequence, prompt, draft, count in zip(sequences, prompts, drafts, counts, strict=True):
        kept = [*prompt, *draft[:count]]
        assert sequence.tokens == kept
        assert int(runner.decode(sequence, 7).argmax()) == fake_next_token([*kept, 7])


@given(
    prompt=st.lists(st.integers(0, 900), min_size=1, max_size=8),
    draft=st.lists(st.integers(0, 900), min_size=2, max_size=4),
    other=st.lists(st.integers(0, 900), min_size=1, max_size=5),
)
def test_logits_come_after_every_token_of_a_draft(prompt, draft, other):
    """Beside another sequence, which wants the logits after its last token only."""
    runner = fake_runner([*VARIANTS, Variant(16, 64, 4, extra_logits=4)])
    first, second = runner.cache.open(), runner.cache.open()
    runner.prefill(first, prompt)
    segments = [Segment(first, np.array(draft), num_logits=len(draft)), Segment(second, np.array(other))]
    variant = runner.variant_for(segments)
    assert variant.num_logits >= len(draft) + 1
    drafted, plain = runner.run(variant, segments).segments
    expected = [fake_next_token([*prompt, *draft[: index + 1]]) for index in range(len(draft))]
    assert drafted.logits.argmax(axis=1).tolist() == expected and drafted.argmax == expected[-1]
    assert plain.logits.shape[0] == 1 and plain.argmax == fake_next_token(other)
    assert runner.variant_for([Segment(second, np.array([3]))]).num_logits == 1


def test_a_recurrent_state_is_kept_as_a_whole_or_not_at_all():
    runner = fake_runner([Variant(rows, kv_len) for rows in (1, 4) for kv_len in (0, 64)], is_recurrent=True)
    sequence = runner.cache.open()
    runner.prefill(sequence, [5, 6, 7, 8])
    draft = [Segment(sequence, np.array([1, 2, 3, 4]))]
    run(runner, draft, [0])
    expected = fake_next_token([5, 6, 7, 8, 9], is_recurrent=True)
    with pytest.raises(AssertionError, match="cannot be cut"):
        run(runner, draft, [2])
    assert runner.cache.is_void, "whoever asked for it must reset the cache"
    sequence = runner.reset()
    runner.prefill(sequence, [5, 6, 7, 8])
    run(runner, [Segment(sequence, np.array([1, 2, 3, 4]))], [0])
    assert int(runner.decode(sequence, 9).argmax()) == expected and not runner.cache.is_void


def test_a_segment_that_goes_to_the_host_leaves_the_arena_empty():
    runner = fake_runner(VARIANTS)
    one, other = runner.cache.open(), runner.cache.open()
    segments = [Segment(one, np.arange(5), to_host=True), Segment(other, np.arange(50, 53))]
    stored, nothing = run(runner, segments, None)
    assert nothing is None and stored.tokens == tuple(range(5)) and runner.cache.slots.num_used == 3
    back = runner.cache.bring_back(stored, 5)
    assert int(runner.decode(back, 7).argmax()) == fake_next_token([*range(5), 7])
    with pytest.raises(AssertionError, match="fresh"):
        Segment(back, np.arange(2), to_host=True)


def test_an_exception_inside_a_transaction_makes_the_cache_void():
    cache = fake_runner(VARIANTS).cache
    with pytest.raises(ValueError, match="in between"), cache.transaction():
        raise ValueError("in between")
    assert cache.is_void
    cache.reset()
    assert not cache.is_void

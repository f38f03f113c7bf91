"""A KV cache in pages: what a program reads by the tables of a call is what each sequence has, whatever was done before."""

import numpy as np
import pytest
from support.engine.paged import PAGE, VARIANT, Paged
from support.quick import examples

from staticllm.core import Variant
from staticllm.kvcache.paged import PagedSlotAllocator
from staticllm.kvcache.step import Segment, Step, StepBuffers


def test_tokens_fill_pages_and_a_second_sequence_has_its_own():
    paged = Paged()
    one, two = paged.cache.open(), paged.cache.open()
    paged.run([(one, [1, 2, 3]), (two, [9])])
    paged.run([(two, [8, 7, 6, 5]), (one, [4, 5])])
    paged.check([one, two])
    assert set(one.slots // PAGE).isdisjoint(two.slots // PAGE)


def test_a_fork_gets_a_copy_of_a_page_only_when_both_go_on():
    paged = Paged()
    one = paged.cache.open()
    paged.run([(one, range(10, 16))])
    two = paged.cache.fork(one, 6)
    assert paged.cache.slots.num_used == 6
    paged.run([(one, [1])])  # fills the shared page
    assert paged.cache.slots.num_used == 7
    paged.run([(two, [2, 3, 4])])
    paged.check([one, two])
    assert paged.cache.slots.num_used == 7 + 2 + 3
    three = paged.cache.fork(two, 5)  # inside a page
    paged.run([(three, [6]), (two, [7])])
    paged.check([one, two, three])


def test_rejected_rows_are_free_again_and_failed_ones_are_zeroed():
    paged = Paged()
    one = paged.cache.open()
    paged.run([(one, [1, 2, 3, 4, 5, 6])], accepted=[2])
    paged.check([one])
    slots = one.slots.copy()
    paged.run([(one, [7, 8, 9])], accepted=[0])
    paged.check([one])
    arena = paged.cache.arena
    memory = arena.host_memory(1)
    arena.read(slots[-1:] + 1, memory, slice(0, 1))
    assert all((array == 0).all() for array in memory)
    paged.run([(one, [3])])
    paged.check([one])


def test_the_slots_of_a_call_that_raised_are_free_in_the_next():
    paged = Paged()
    one = paged.cache.open()
    step = Step(VARIANT, (Segment(one, np.arange(5)),))
    paged.cache.fill(step, paged.buffers)
    assert paged.cache.slots.num_used == 5
    paged.run([(one, [1, 2])])
    paged.check([one])
    assert paged.cache.slots.num_used == 2


def test_a_prompt_can_go_to_the_host():
    paged = Paged()
    one = paged.cache.open()
    (stored,) = paged.run([(one, [1, 2, 3, 4, 5])], to_host=True)
    assert stored.tokens == (1, 2, 3, 4, 5) and not len(one) and paged.cache.slots.num_used == 0
    two = paged.cache.bring_back(stored, 5)
    paged.run([(two, [6])])
    paged.check([two])


def test_tables_grow_without_moving_when_the_sizes_are_the_same():
    paged = Paged()
    one = paged.cache.open()
    paged.run([(one, [1])])
    sizes = paged.pool.pages.sizes
    paged.run([(one, [2])])
    assert paged.pool.pages.sizes == sizes
    paged.run([(one, range(40))])
    assert paged.pool.pages.sizes != sizes


def test_free_slots_leave_a_page_for_each_sequence_of_a_call():
    """Whatever was done, as many sequences as a call has can each get one of the free slots."""
    slots = PagedSlotAllocator(64, 64 // PAGE + 8, PAGE, 4)
    assert slots.num_free == 64
    found = [slots.extend(np.zeros(0, np.intp), 1)[1] for _ in range(12)]
    assert slots.num_free == (64 // PAGE + 8 - 12 - 4) * PAGE == 32  # most pages have one token
    assert slots.num_used == 12
    for each in found:
        slots.free(each)
    assert slots.num_free == 64


@pytest.mark.parametrize("seed", range(examples(12)))
def test_random_work_keeps_every_token(seed):
    """Calls, forks, cuts, shifts, copies and idle sequences in any order; 0 of them may lose or mix a token."""
    rng = np.random.default_rng(seed)
    paged = Paged(num_slots=192, variant=Variant(64, 192, 6))
    cache = paged.cache
    sequences = [cache.open()]
    for _ in range(120):
        what = rng.integers(7)
        each = sequences[rng.integers(len(sequences))]
        if what <= 2:
            chosen = rng.permutation(len(sequences))[: rng.integers(1, 5)]
            parts = [(sequences[place], rng.integers(1, 99, rng.integers(1, 9)).tolist()) for place in chosen]
            if sum(len(tokens) for _, tokens in parts) <= cache.slots.num_free:
                paged.run(parts, [int(rng.integers(0, len(tokens) + 1)) for _, tokens in parts])
        elif what == 3 and len(sequences) < 6:
            sequences.append(cache.fork(each, int(rng.integers(0, len(each) + 1))))
        elif what == 4:
            cache.cut(each, int(rng.integers(0, len(each) + 1)))
        elif what == 5 and len(sequences) > 1:
            cache.close(sequences.pop(rng.integers(len(sequences))))
        elif what == 6 and len(each) <= cache.slots.num_free and len(sequences) < 6:
            sequences.append(cache.bring_back(cache.copy_out(each), len(each)))
            cache.mark_idle(each)
            cache.mark_active(each)
        paged.check(sequences)
    for each in sequences:
        cache.close(each)
    assert cache.slots.num_used == 0 and cache.slots.num_free == 192


@pytest.mark.parametrize("variant", [Variant(64, 0, 1), Variant(64, 200, 3), Variant(6, 256, 6), Variant(1, 31)])
def test_a_call_without_a_request_is_as_large_as_its_variant_and_writes_to_no_sequence(variant):
    paged = Paged()
    sequence = paged.cache.open()
    paged.run([(sequence, [1, 2, 3, 4, 5])])
    buffers = StepBuffers(variant, paged.pool)
    paged.pool.pages.idle_page = paged.cache.idle_page
    buffers.stand_in()
    tables, counts = paged.pool.pages.arrays(), np.diff(paged.pool.pages.arrays()["subsequence_begins"])
    assert (counts.sum(), len(counts), paged.pool.pages.num_logits) == (
        variant.rows,
        variant.sequences,
        variant.num_logits,
    )
    assert 0 <= variant.past_in_pages - tables["past_lens"].max() < PAGE
    work = np.array(paged.pool.pages.work)
    np.testing.assert_allclose(work, variant.work_in_pages, atol=PAGE * variant.rows)
    (num_pages, *_) = paged.cache.arena.state_view(0).shape
    for index, (past, count) in enumerate(zip(tables["past_lens"], counts, strict=True)):
        pages = tables["block_indices"][slice(*tables["block_indices_begins"][index : index + 2])]
        assert len(pages) == -(-(past + count) // PAGE)
        assert (pages[past // PAGE :] == num_pages - 1).all()
        assert (pages < num_pages).all()
    longer = paged.cache.open()
    for start in range(0, 250, 50):
        paged.run([(longer, range(start, start + 50))])
    assert num_pages - 1 not in {int(slot) // PAGE for slot in longer.slots}
    paged.check([sequence, longer])

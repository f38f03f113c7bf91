import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.kvcache.slot_allocator import SlotAllocator


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_no_row_is_handed_out_twice_and_none_is_lost(moves):
    allocator, held = SlotAllocator(32), []
    for is_allocation, count in moves:
        if is_allocation and count <= allocator.num_free:
            held.append(allocator.allocate(count))
        elif not is_allocation and held:
            allocator.free(held.pop(count % len(held)))
        rows = np.concatenate([*held, np.empty(0, np.intp)])
        assert len(set(rows.tolist())) == len(rows) == allocator.num_used
        assert allocator.num_used + allocator.num_free == 32
        assert allocator.high_slot == (rows.max() + 1 if len(rows) else 0)


def test_low_rows_go_first():
    allocator = SlotAllocator(8)
    first, second = allocator.allocate(3), allocator.allocate(2)
    allocator.free(first)
    assert allocator.allocate(4).tolist() == [0, 1, 2, 5]
    assert second.tolist() == [3, 4]


def test_freeing_twice_is_noticed():
    allocator = SlotAllocator(4)
    rows = allocator.allocate(2)
    allocator.free(rows)
    with pytest.raises(AssertionError):
        allocator.free(rows)


def test_a_shared_slot_is_free_without_a_holder():
    allocator = SlotAllocator(4)
    rows = allocator.allocate(3)
    allocator.share(rows[:2])
    allocator.free(rows)
    assert allocator.num_used == 2 and allocator.high_slot == 2
    allocator.free(rows[:2])
    assert allocator.num_used == 0


def test_rows_that_only_some_hold():
    rows = SlotAllocator(16)
    mine, other, running = rows.allocate(4), rows.allocate(3), rows.allocate(2)
    rows.share(mine[:2])  # between two of those asked about
    rows.share(other[:1])  # with somebody else
    assert rows.count_only([mine, mine[:2], other]) == 4 + 2
    assert rows.count_only([mine, other]) == 2 + 2
    assert rows.count_only([]) == 0 and rows.count_only([running]) == 2

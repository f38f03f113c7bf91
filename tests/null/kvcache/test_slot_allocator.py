import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.kvcache.slot_allocator import SlotAllocator


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_no_slot_is_allocated_twice_or_lost(moves):
    allocator, held = SlotAllocator(32), []
    for is_allocation, count in moves:
        if is_allocation and count <= allocator.num_free:
            held.append(allocator.allocate(count))
        elif not is_allocation and held:
            allocator.free(held.pop(count % len(held)))
        slots = np.concatenate([*held, np.empty(0, np.intp)])
        assert len(set(slots.tolist())) == len(slots) == allocator.num_used
        assert allocator.num_used + allocator.num_free == 32
        assert allocator.high_slot == (slots.max() + 1 if len(slots) else 0)


def test_the_lowest_slots_are_allocated_first():
    allocator = SlotAllocator(8)
    first, second = allocator.allocate(3), allocator.allocate(2)
    allocator.free(first)
    assert allocator.allocate(4).tolist() == [0, 1, 2, 5]
    assert second.tolist() == [3, 4]


def test_freeing_a_free_slot_is_an_error():
    allocator = SlotAllocator(4)
    slots = allocator.allocate(2)
    allocator.free(slots)
    with pytest.raises(AssertionError):
        allocator.free(slots)


def test_a_shared_slot_is_free_after_its_last_holder():
    allocator = SlotAllocator(4)
    slots = allocator.allocate(3)
    allocator.share(slots[:2])
    allocator.free(slots)
    assert allocator.num_used == 2
    assert allocator.high_slot == 2
    allocator.free(slots[:2])
    assert allocator.num_used == 0


def test_count_only_counts_slots_without_other_holders():
    allocator = SlotAllocator(16)
    mine, other, running = allocator.allocate(4), allocator.allocate(3), allocator.allocate(2)
    allocator.share(mine[:2])  # two of the given holders share these
    allocator.share(other[:1])  # a holder that is not given shares this one
    assert allocator.count_only([mine, mine[:2], other]) == 4 + 2
    assert allocator.count_only([mine, other]) == 2 + 2
    assert allocator.count_only([]) == 0
    assert allocator.count_only([running]) == 2


changes = st.lists(
    st.tuples(st.sampled_from(["allocate", "share", "free", "idle", "active", "move"]), st.integers(0, 9))
)


@given(changes)
def test_slots_are_counted_by_their_active_and_idle_holders(moves):
    """The counts are kept from change to change; here they are compared with those of all holders' slots."""
    allocator, held = SlotAllocator(32), []  # the slots of each holder, and whether it is idle
    for kind, number in moves:
        slots, is_idle = held[number % len(held)] if held else (None, None)
        if kind == "allocate" and number <= allocator.num_free:
            held.append((allocator.allocate(number), False))
        elif kind == "move":
            old, new = allocator.move_down()
            places = np.arange(32)
            places[old] = new
            held = [(places[slots], is_idle) for slots, is_idle in held]
        elif slots is not None and kind == "share":
            allocator.share(slots)
            held.append((slots.copy(), False))
        elif slots is not None and kind in ("idle", "active") and is_idle != (kind == "idle"):
            (allocator.mark_idle if kind == "idle" else allocator.mark_active)(slots)
            held[number % len(held)] = (slots, kind == "idle")
        elif slots is not None and kind == "free" and not is_idle:
            allocator.free(slots)
            del held[number % len(held)]
        active = [slot for slots, is_idle in held if not is_idle for slot in slots.tolist()]
        assert allocator.num_active == len(set(active))
        assert allocator.num_used == len({slot for slots, _ in held for slot in slots.tolist()})
        for slots, is_idle in held:
            if not is_idle:
                assert allocator.count_freed(slots) == sum(active.count(slot) == 1 for slot in slots.tolist())

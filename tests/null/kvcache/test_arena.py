from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.core import KVState
from staticllm.kvcache.arena import Arena

STATES = [KVState(0, "key", "a", 3, 4), KVState(0, "value", "b", 3, 4), KVState(1, "key", "c", 1, 6)]


def presents(rng, count):
    return [rng.normal(size=(2, 3, count, 4)).astype(np.float32), rng.normal(size=(1, 1, count, 6)).astype(np.float32)]


@given(st.lists(st.sampled_from([8, 16, 24, 40]), min_size=1, max_size=8), st.integers(0, 8), st.integers(0, 99))
def test_slots_survive_every_change_of_stride(strides, num_slots, seed):
    arena, rng = Arena(STATES, 40), np.random.default_rng(seed)
    arena.set_stride(8, 0)
    new = presents(rng, num_slots)
    arena.write(slice(0, num_slots), new, slice(0, num_slots))
    for stride in strides:
        arena.set_stride(stride, num_slots)
        for index, expected in enumerate([new[0][0], new[0][1], new[1][0]]):
            assert np.array_equal(arena.state_view(index, stride)[0, :, :num_slots], expected)


def test_views_are_contiguous_and_start_at_one_address():
    arena = Arena(STATES, 40)
    for index in range(len(STATES)):
        views = [arena.state_view(index, stride) for stride in (8, 24, 40)]
        assert all(view.flags.c_contiguous for view in views)
        assert len({view.ctypes.data for view in views}) == 1


def test_rows_are_written_to_scattered_slots():
    arena, new = Arena(STATES, 8), presents(np.random.default_rng(0), 4)
    arena.write(np.array([6, 1]), new, slice(2, 4))
    view = arena.state_view(1, 8)[0]
    assert np.array_equal(view[:, 6], new[0][1][:, 2])
    assert np.array_equal(view[:, 1], new[0][1][:, 3])
    assert not view[:, [0, 2, 3, 4, 5, 7]].any()


def test_the_arena_allocates_its_memory_once():
    arena = Arena([replace(state, kv_type="f16") for state in STATES], 40)
    assert arena.num_bytes == (2 * 3 * 4 + 6) * 40 * 2
    addresses = arena.addresses
    arena.set_stride(8, 0)
    arena.set_stride(40, 8)
    assert addresses == arena.addresses


def test_an_arena_that_does_not_fit_raises_a_memory_error():
    """The loader makes one line of it, but not of the system's own error."""
    with pytest.raises(MemoryError):
        Arena([KVState(0, "key", "k", 2, 64)], 1 << 44)

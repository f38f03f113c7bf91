"""Clearing an arena takes no memory, and releasing it gives its memory back."""

import sys
from pathlib import Path

import numpy as np
import pytest

from staticllm.core import KVState
from staticllm.kvcache.arena import Arena


def megabytes_in_memory():
    with Path("/proc/self/statm").open(encoding="ascii") as file:
        return int(file.read().split()[1]) * 4 / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_clearing_an_arena_takes_no_memory():
    states = [KVState(0, role, role, 8, 64, "f32") for role in ("key", "value")]
    arena = Arena(states, 1 << 15)
    assert arena.num_bytes >= 128 << 20
    arena.blocks[0][:, 5] = 1
    before = megabytes_in_memory()
    arena.clear()
    assert megabytes_in_memory() - before < 16
    assert not np.any(arena.blocks[0][:, :4096])
    arena.blocks[0][:] = 1
    assert megabytes_in_memory() - before > 64
    arena.release()
    assert megabytes_in_memory() - before < 16

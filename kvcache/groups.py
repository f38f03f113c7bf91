"""Which KV states share an array: those with the same number of heads, head size and element type."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from staticllm.core import KVState, KVType

HOST_TYPES: dict[KVType, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "u8": np.uint8}
"""What numpy holds keys and values in. It has no bf16; the host only moves them and never computes with them."""


@dataclass(frozen=True)
class StateGroup:
    """States of one shape. ``members`` are their places in the model's list of KV states."""

    members: tuple[int, ...]
    heads: int
    head_dim: int
    dtype: type[np.generic]

    def shape(self, num_slots: int) -> tuple[int, int, int, int]:
        """``[n, heads, num_slots, head_dim]``: all members together."""
        return len(self.members), self.heads, num_slots, self.head_dim


@lru_cache(maxsize=64)
def group_states(states: tuple[KVState, ...]) -> tuple[StateGroup, ...]:
    """The groups of a model's KV states, in order of first appearance. Arena, buffers and stored sequences all use this list."""
    members: dict[tuple[int, int, type[np.generic]], list[int]] = {}
    for index, state in enumerate(states):
        members.setdefault((state.heads, state.head_dim, HOST_TYPES[state.kv_type]), []).append(index)
    return tuple(StateGroup(tuple(places), *key) for key, places in members.items())


def place_of(groups: tuple[StateGroup, ...], index: int) -> tuple[int, int]:
    """Where state ``index`` lies: its group, and its line in the arrays of that group.

    Raises:
        IndexError: there is no such state.
    """
    for number, group in enumerate(groups):
        if index in group.members:
            return number, group.members.index(index)
    raise IndexError(f"no KV state {index}")

"""Groups the KV states that share an array, which have the same number of heads, head size and element type."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from staticllm.core import KVState, KVType

HOST_TYPES: dict[KVType, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "u8": np.uint8}
"""The numpy type of each KV type. Numpy has no bf16; uint16 holds its bits, as the host only copies keys and values."""


@dataclass(frozen=True)
class StateGroup:
    """States of one shape. ``members`` holds their indices in the model's list of KV states."""

    members: tuple[int, ...]
    heads: int
    head_dim: int
    dtype: type[np.generic]

    def shape(self, num_slots: int) -> tuple[int, int, int, int]:
        """Return the shape of an array for all n members: ``[n, heads, num_slots, head_dim]``."""
        return len(self.members), self.heads, num_slots, self.head_dim


@lru_cache(maxsize=64)
def group_states(states: tuple[KVState, ...]) -> tuple[StateGroup, ...]:
    """Return the groups of a model's KV states, in order of first appearance; arena, buffers and stored sequences use it."""
    members: dict[tuple[int, int, type[np.generic]], list[int]] = {}
    for index, state in enumerate(states):
        members.setdefault((state.heads, state.head_dim, HOST_TYPES[state.kv_type]), []).append(index)
    return tuple(StateGroup(tuple(places), *key) for key, places in members.items())


def place_of(groups: tuple[StateGroup, ...], index: int) -> tuple[int, int]:
    """Return the index of the group of state ``index``, and the state's index in the arrays of that group.

    Raises:
        IndexError: there is no such state.
    """
    for number, group in enumerate(groups):
        if index in group.members:
            return number, group.members.index(index)
    raise IndexError(f"no KV state {index}")

"""A sequence is the tokens of one conversation that are in the arena, with their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int] | NDArray[np.int64]
StateSet = tuple[NDArray[Any], ...]
"""The recurrent states of one sequence, after its last token."""
AdapterScales = tuple[float, ...]
"""The factor of each adapter of the model; () if it uses none."""
FIRST_ROOM = 256
"""The number of tokens for which a new sequence has room; it doubles when it is full."""
HEAD = 8
"""The number of tokens that are compared first, because most sequences differ within them."""


@dataclass(frozen=True)
class Conditions:
    """What keys and values depend on beside tokens and positions: those of other conditions are other numbers.

    ``cross_window``: the number of the window that its cross-attention sees (``CrossBank``); 0 without one. ``factors``: which
    of the model's RoPE factors they have, which follows from the length of the text (``KVCache.factors_of``).
    """

    adapters: AdapterScales = ()
    cross_window: int = 0
    factors: int = 0


PLAIN = Conditions()
"""No adapters, and no window."""


class KVSequence:
    """The tokens of one conversation. Token i has position i and arena slot ``slots[i]``. Only ``KVCache`` changes it.

    ``epoch`` counts the changes other than appending; a mask that was painted in another epoch must be repainted.
    ``conditions`` are those under which all of its tokens were computed. ``is_idle``: whether its slots may be taken for others.
    """

    def __init__(self, conditions: Conditions = PLAIN) -> None:
        self.conditions = conditions
        self._slots = np.zeros(FIRST_ROOM, np.intp)
        self.tokens: list[int] = []
        self.epoch = 0
        self.is_idle = False
        self.states: StateSet | None = None  # recurrent states, unless the StateBank holds them as the live ones

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def slots(self) -> NDArray[np.intp]:
        """Arena slots ``[length]``, in the order of the tokens."""
        return self._slots[: len(self.tokens)]

    def append(self, tokens: Sequence[int], slots: NDArray[np.intp]) -> None:
        """Add tokens at the end; ``slots [len(tokens)]`` hold their keys and values."""
        start = len(self.tokens)
        end = start + len(slots)
        if end > len(self._slots):
            self._slots = np.resize(self._slots, max(end, 2 * len(self._slots)))
        self._slots[start:end] = slots
        self.tokens.extend(tokens)

    def replace_last(self, slots: NDArray[np.intp]) -> None:
        """Let the last tokens lie in ``slots [n]``."""
        self._slots[len(self.tokens) - len(slots) : len(self.tokens)] = slots
        self.epoch += 1

    def cut(self, length: int) -> NDArray[np.intp]:
        """Keep the first ``length`` tokens; return the slots ``[n]`` of the others."""
        dropped = self.slots[length:].copy()
        del self.tokens[length:]
        self.epoch += 1
        return dropped

    def move(self, places: NDArray[np.intp]) -> None:
        """Replace each slot s by ``places[s]``; ``places [num_slots]``."""
        self._slots[: len(self.tokens)] = places[self.slots]
        self.epoch += 1


def may_share(mine: Tokens, other: Tokens, count: int) -> bool:
    """Return whether the first ``count`` tokens, at least one, may be equal: by the ends, where most that are compared differ."""
    return min(len(mine), len(other)) >= count and bool(mine[0] == other[0] and mine[count - 1] == other[count - 1])


def common_prefix(mine: Tokens, other: Tokens) -> int:
    """Return the number of leading tokens that are equal."""
    limit = min(len(mine), len(other))
    if limit > HEAD and not np.array_equal(mine[:HEAD], other[:HEAD]):
        limit = HEAD
    same = np.asarray(mine[:limit]) == np.asarray(other[:limit])
    return limit if same.all() else int(np.argmin(same))

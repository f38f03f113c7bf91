"""Finds texts with a common prefix, so that a call computes the prefix only once.

A decoder computes the same values for a prefix, whatever follows: the instruction before queries, or the query before the texts
that a reranker compares with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ....kvcache.sequence import common_prefix
from .tokenized_text import TokenizedText

LEAST_SHARED = 8
"""The least tokens of a beginning that is shared. What fewer save is less than what looking for them takes."""


@dataclass(frozen=True, eq=False)
class PrefixGroup:
    """Texts that have their first ``num_tokens`` tokens in common."""

    num_tokens: int


@dataclass(frozen=True)
class CommonPrefixes:
    """The groups of texts that begin alike, by the index of the text; None for a text that begins like no other."""

    groups: Sequence[PrefixGroup | None]
    order: Sequence[int]
    """The place of each text if all are sorted by their tokens. In this order, each text of a group has at least the group's
    tokens in common with the one before it."""


@dataclass
class _SortedTexts:
    """The sorted texts from ``first`` to ``last``."""

    first: int
    last: int
    saved: int = 0
    """The tokens that these groups save."""
    groups: list[tuple[int, int, int]] = field(default_factory=list)
    """The first and last text, and the tokens, of each of their groups."""


def num_common(one: TokenizedText, other: TokenizedText) -> int:
    """Return how many tokens at their beginning two texts have in common, with the same types."""
    size = common_prefix(one.ids, other.ids)
    if one.types is None and other.types is None:
        return size
    zeros = np.zeros(size, np.int64)
    return common_prefix(*(zeros if text.types is None else text.types[:size] for text in (one, other)))


def shared_with_previous(texts: Sequence[TokenizedText]) -> list[int]:
    """Return for each text the number of tokens that it shares with the one before it: 0, or at least ``LEAST_SHARED``."""
    found = [num_common(before, text) for before, text in pairwise(texts)]
    return [0, *(num if num >= LEAST_SHARED else 0 for num in found)][: len(texts)]


def find_groups(texts: Sequence[TokenizedText]) -> CommonPrefixes | None:
    """Return the groups of texts that save the most tokens if each is in one sequence; None if no texts begin alike.

    Sorted texts are joined to runs, those with the longest common beginning first. Joining two runs to one group pays if more
    tokens are saved by it than by their own groups.
    """
    keys = [text.ids.astype(">i8").tobytes() + (b"" if text.types is None else text.types.tobytes()) for text in texts]
    places = sorted(range(len(texts)), key=keys.__getitem__)
    common = shared_with_previous([texts[place] for place in places])
    if not any(common):
        return None
    runs = {
        at: _SortedTexts(at, at) for at in range(len(texts))
    }  # right at the ends of runs; inside, earlier ones are left
    for at in sorted((at for at, num in enumerate(common) if num), key=lambda at: -common[at]):
        _join(runs, runs[at - 1], runs[at], common[at])
    groups: list[PrefixGroup | None] = [None] * len(texts)
    at = 0
    while at < len(texts):
        run = runs[at]
        for first, last, num_tokens in run.groups:
            group = PrefixGroup(num_tokens)
            for place in places[first : last + 1]:
                groups[place] = group
        at = run.last + 1
    order = [0] * len(texts)
    for at, place in enumerate(places):
        order[place] = at
    return CommonPrefixes(groups, order)


def _join(runs: dict[int, _SortedTexts], left: _SortedTexts, right: _SortedTexts, num_tokens: int) -> None:
    """Replace two neighbours by one run: one group of ``num_tokens``, or the groups of both."""
    joined = _SortedTexts(left.first, right.last, left.saved + right.saved, left.groups + right.groups)
    saved = (joined.last - joined.first) * num_tokens
    if saved >= joined.saved:
        joined.saved = saved
        joined.groups = [(joined.first, joined.last, num_tokens)]
    runs[joined.first] = joined
    runs[joined.last] = joined

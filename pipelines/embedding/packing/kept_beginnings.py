"""Keeps the keys and values of beginnings that come again and again, such as the instruction before each query.

A text that comes alone is compared with the one before it. If both begin alike, its beginning is kept, and the next text that
begins so runs only what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from staticllm.pipelines.embedding.packing.continued_text import ContinuedText, Rows
from staticllm.pipelines.embedding.packing.prefix_groups import LEAST_SHARED, num_common
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText

MOST_KEPT, MOST_TOKENS = 4, 128
"""The most beginnings that are kept, and the most tokens of each."""


@dataclass(frozen=True, eq=False)
class Beginning:
    """The first tokens of a text, and their keys and values, ``[1, heads, P, head_dim]`` for each port."""

    text: TokenizedText
    num_tokens: int
    past: Sequence[Rows]


class KeptBeginnings:
    """The beginnings that were used last. Only the thread that owns the device uses it."""

    def __init__(self) -> None:
        self._kept: list[Beginning] = []
        self._previous: TokenizedText | None = None
        self._num_common = 0  # of the previous one and the one before it

    def find(self, text: TokenizedText) -> tuple[int, Sequence[Rows]] | None:
        """Return how many tokens of a text are kept, and their keys and values; None if none are.

        The last token always runs, because its hidden state is the result.
        """
        counts = [min(num_common(text, kept.text), kept.num_tokens, len(text) - 1) for kept in self._kept]
        most = max(counts, default=0)
        if most < LEAST_SHARED:
            return None
        found = self._kept.pop(counts.index(most))
        self._kept.append(found)
        return most, found.past

    def to_keep(self, text: TokenizedText) -> int:
        """Return how many tokens of a text that comes alone are worth keeping: those that the one before it began with, too."""
        previous, self._previous = self._previous, text
        if previous is not text:  # else it is planned once more
            count = 0 if previous is None else min(num_common(text, previous), MOST_TOKENS, len(text) - 1)
            self._num_common = count if count >= LEAST_SHARED else 0
        return self._num_common

    def keep(self, chunk: ContinuedText, num_tokens: int) -> None:
        """Keep the beginning of a text, with its keys and values; the one that was not used for the longest time is dropped."""
        self._kept.append(Beginning(chunk.text, num_tokens, chunk.past))
        del self._kept[:-MOST_KEPT]

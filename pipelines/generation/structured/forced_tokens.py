"""Drafts the tokens that a grammar leaves no choice about, so that one call checks them together ("jump ahead")."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from staticllm.pipelines.generation.structured.mask import GrammarMask

Draft = TypeVar("Draft")


class ForcedTokens(Generic[Draft]):
    """A drafter of one answer. All of its tokens are accepted, if they are checked with the sampler that has the same mask.

    ``make`` returns the draft of tokens, which may be none.
    """

    can_pause = False

    def __init__(self, mask: GrammarMask, make: Callable[[tuple[int, ...]], Draft]) -> None:
        self._mask, self._make = mask, make

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """Return a draft of at most ``limit`` tokens that must follow ``tokens``, the prompt and the answer so far.

        The mask knows these tokens: the sampler has told it each one that it chose.
        """
        return self._make(tuple(self._mask.forced_tokens(limit)))

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Learn nothing: the grammar alone decides."""

    def forget(self) -> None:
        """Forget nothing: a conversation that was shortened goes on at the same place of its grammar."""

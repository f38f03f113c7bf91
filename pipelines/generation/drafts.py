"""Drafts are guesses of the next tokens of an answer. One device call checks all tokens of a draft, each in a row of its own.

A request has a list of drafters; the first that proposes something decides. Accepted tokens are exactly those that the sampler
would have chosen one by one, so a bad drafter costs time but never changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_DRAFT = 15
"""The most tokens of a draft if the request sets no limit; with the last chosen token they fill 16 rows."""
DEFAULT_NGRAM_SIZE = 3
"""The longest n-grams of prompt lookup if the pipeline has it and a request does not say it."""
MAX_INDEXED = 8
"""The longest n-grams that prompt lookup indexes. Longer ones would nearly always find the same place."""
MANY_TOKENS = 32
"""If more tokens are added at once, prompt lookup indexes all of them together."""


@dataclass(frozen=True)
class DraftParams:
    """How the tokens of a request are drafted, as plain values."""

    max_ngram_size: int = 0
    """The longest n-gram at the end of the tokens that prompt lookup searches in them; 0 without prompt lookup."""
    max_tokens: int = 0
    """The most tokens of a draft; 0 if only the engine limits them."""
    uses_model: bool = False
    """Whether the draft model of the pipeline proposes tokens where prompt lookup finds none."""
    confidence: float = 0.0
    """A draft of the model ends before the first token whose probability is lower."""


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow; empty if nothing is proposed.

    Drafts of one ``kind`` are expected to be accepted equally often, which the engine measures.
    """

    tokens: tuple[int, ...] = ()
    kind: str = ""
    is_certain: bool = False
    """Whether no other tokens can follow, for example because a grammar forces these."""


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Guesses the next tokens of one answer. It belongs to one request and may keep state. Used on the engine's thread."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """Return at most ``limit`` tokens that may follow ``tokens``, the prompt and the answer so far.

        It is called at most once per token of the answer, and not for each: ``tokens`` may have grown by several.
        """
        ...

    @property
    def can_pause(self) -> bool:
        """Whether it need not be asked at every step, if its drafts do not pay."""
        ...

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Learn that the first ``num_accepted`` of ``num_proposed`` tokens of its last draft were chosen."""
        ...

    def forget(self) -> None:
        """Forget all tokens: the conversation was shortened, and the next ``tokens`` do not continue the last ones."""
        ...


class PromptLookup:
    """Proposes the tokens that followed the last occurrence of the longest n-gram at the end of the tokens.

    The search is that of GenAI's prompt lookup, except that the last occurrence counts and not the first. An index has the place
    of each n-gram, so that a token costs ``max_ngram_size`` look-ups, however long the text is. Where the text repeats itself
    with a short period, the proposal continues the repetition.

    Args:
        max_ngram_size: The longest n-gram, at least 1; lengths above ``MAX_INDEXED`` count as ``MAX_INDEXED``.
        tokens: Tokens that can be indexed now, for example on another thread.
    """

    can_pause = True

    def __init__(self, max_ngram_size: int, tokens: Sequence[int] = ()) -> None:
        assert max_ngram_size > 0
        self._max_size = min(max_ngram_size, MAX_INDEXED)
        self.forget()
        self._index(tokens)

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """Return the ``limit`` tokens that follow the found n-gram. The kind is its length."""
        self._index(tokens)
        for size in range(self._max_size, 0, -1):
            if place := self._found[size - 1]:
                return Draft(_continuation(tokens, place, limit), f"lookup {size}")
        return NO_DRAFT

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Learn nothing: the text alone decides."""

    def forget(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # of n-grams: the index of the token after the last occurrence
        # by length - 1: the place of the last n-gram's previous occurrence; 0 without one
        self._found = [0] * self._max_size
        self._num_indexed = 0

    def _index(self, tokens: Sequence[int]) -> None:
        """Add the n-grams that end in tokens after those that are indexed."""
        places = self._places
        found = self._found
        if len(tokens) - self._num_indexed > MANY_TOKENS:
            self._index_many(tokens[:-1])
        for end in range(self._num_indexed + 1, len(tokens) + 1):
            for size in range(1, min(self._max_size, end) + 1):
                ngram = tuple(tokens[end - size : end])
                found[size - 1] = places.get(ngram, 0)
                places[ngram] = end
        self._num_indexed = len(tokens)

    def _index_many(self, tokens: Sequence[int]) -> None:
        """Add all n-grams of ``tokens``, faster than one by one. What was found for the last of them is not known then."""
        for size in range(1, self._max_size + 1):
            ngrams = zip(*(tokens[start:] for start in range(size)), strict=False)
            self._places.update(zip(ngrams, range(size, len(tokens) + 1), strict=False))
        self._num_indexed = len(tokens)


def _continuation(tokens: Sequence[int], place: int, limit: int) -> tuple[int, ...]:
    """Return ``limit`` tokens from index ``place`` on; after the last one they repeat from ``place``."""
    following = tokens[place : place + limit]
    repeats = -(-limit // len(following)) if following else 0
    return tuple([*following] * repeats)[:limit]


class AcceptanceRates:
    """How often the tokens of drafts were accepted lately, by the kind of the draft.

    A rate is the probability that a drafted token is accepted if all tokens before it were. Without observations it is that of
    ``others``, the average over requests, or ``OPTIMISM``. ``kept`` is the share of earlier observations that a draft leaves.
    """

    OPTIMISM = 0.6
    """The rate before any observation."""
    MOST = 0.8
    """The highest initial rate of a request: another text may be quite different."""
    WEIGHT = 1.0
    """The number of tokens for which the initial rate counts."""

    def __init__(self, others: AcceptanceRates | None = None, kept: float = 0.9) -> None:
        self._others = others
        self._kept = kept
        self._counts: dict[str, tuple[float, float]] = {}  # by kind: tokens that were checked, and accepted ones

    def rate(self, draft: Draft) -> float:
        """Return the probability that the next token of such a draft is accepted, below 1 unless the draft is certain."""
        if draft.is_certain:
            return 1.0
        initial = self.OPTIMISM if self._others is None else min(self._others.rate(draft), self.MOST)
        num_checked, num_accepted = self._counts.get(draft.kind, (0.0, 0.0))
        return (num_accepted + self.WEIGHT * initial) / (num_checked + self.WEIGHT)

    def observe(self, draft: Draft, num_accepted: int) -> None:
        """Count a draft of which the first ``num_accepted`` tokens were accepted; the one after them was checked, too."""
        num_checked = min(num_accepted + 1, len(draft.tokens))
        checked, accepted = self._counts.get(draft.kind, (0.0, 0.0))
        self._counts[draft.kind] = self._kept * checked + num_checked, self._kept * accepted + num_accepted
        if self._others is not None:
            self._others.observe(draft, num_accepted)


class AnswerDrafts:
    """The drafters of one answer, and how often their drafts were accepted. Used on the engine's thread.

    ``drafters`` may be extended; earlier ones go first. ``surplus``: the decode steps that drafts have saved, up to a limit.
    """

    def __init__(self, params: DraftParams, prompt: Sequence[int]) -> None:
        self.params = params
        self.drafters: list[Drafter] = []
        self._rates: AcceptanceRates | None = None
        self.num_proposed = 0
        self.num_accepted = 0
        self.surplus = 0.0
        self._last: Drafter | None = None
        self._pause = 0
        self._num_paused = 0
        if params.max_ngram_size:
            self.drafters.append(PromptLookup(params.max_ngram_size, prompt))

    @property
    def limit(self) -> int:
        return self.params.max_tokens or MAX_DRAFT

    def count_step(self) -> bool:
        """Count a step of the answer, and return whether it should be asked for a draft: not while drafts pause."""
        if self._num_paused < self._pause and all(drafter.can_pause for drafter in self.drafters):
            self._num_paused += 1
            return False
        return True

    def pause(self, longest: int) -> None:
        """Let drafts pause for twice as many steps as the last time, and at most ``longest``; 0 if the last one pays."""
        self._pause = min(2 * self._pause + 1, longest)
        self._num_paused = 0

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """Return the draft of the first drafter that has one, with at most ``limit`` tokens."""
        for drafter in self.drafters:
            draft = drafter.propose(tokens, limit)
            if draft.tokens:
                self._last = drafter
                return draft
        self._last = None
        return NO_DRAFT

    def rates_among(self, others: AcceptanceRates) -> AcceptanceRates:
        """Return the rates of this answer, which begin with those of the others."""
        if self._rates is None:
            self._rates = AcceptanceRates(others)
        return self._rates

    def observe(self, draft: Draft, num_accepted: int) -> None:
        """Learn how many tokens of the last draft, as it was checked, were accepted."""
        self.num_proposed += len(draft.tokens)
        self.num_accepted += num_accepted
        if self._rates is not None:
            self._rates.observe(draft, num_accepted)
        if self._last is not None:
            self._last.observe(len(draft.tokens), num_accepted)

    def forget(self) -> None:
        """Forget all tokens: the conversation was shortened."""
        for drafter in self.drafters:
            drafter.forget()

"""The logits processor of grammars, which forbids what the grammar does not allow, and the drafter of what it forces.

This is where an engine meets grammars: it knows their value (``Grammar``), what follows an answer through one
(``AnswerMatcher``), and what compiles them (``Grammars``), and nothing of how that is done (``pipelines/grammars``).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import GenerationConfigError

from .grammar import Grammar

Draft = TypeVar("Draft")

MAX_REFUSED = 4
"""The most tokens of one place that are refused one by one; then the answer goes a short way to its end."""
FEW = 4096
"""With at most this many allowed tokens, their logits are gathered; with more, the others are overwritten."""


@dataclass
class MaskTimes:
    """How long masks took, in seconds: those made while the device ran, and those for which it waited."""

    num_hidden: int = 0
    num_exposed: int = 0
    hidden: float = 0.0
    exposed: float = 0.0

    @property
    def hidden_share(self) -> float:
        """The share of the time that the device did not wait for; 1.0 without masks."""
        total = self.hidden + self.exposed
        return self.hidden / total if total else 1.0


class GrammarLimitError(GenerationConfigError):
    """A grammar became too complex within an answer, which cannot go on."""


class AnswerMatcher(Protocol):
    """The place of one answer in what it must look like. One thread at a time.

    Raises:
        GrammarLimitError: by ``allowed`` and ``accept``, if the grammar became too complex.
        GenerationConfigError: by ``accept``, if a token does not match.
    """

    def clone(self) -> AnswerMatcher:
        """Return a matcher at the same place, which goes on by itself."""
        ...

    @property
    def can_end(self) -> bool:
        """Whether the answer so far is a whole one."""
        ...

    @property
    def is_at_end(self) -> bool:
        """Whether the answer so far is a whole one and nothing can follow."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may follow, bool ``[vocab]``; nothing is said about the token that ends the answer."""
        ...

    def forced(self) -> list[int]:
        """Return the tokens that must follow in this order; empty if there is a choice, or at the end."""
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on by these tokens, none of which may be one that ends the answer."""
        ...

    def fits(self, tokens: Sequence[int], num_left: int) -> bool:
        """Return whether the answer can end with at most ``num_left`` tokens after ``tokens``, as far as is known."""
        ...

    def is_far(self, num_left: int) -> bool:
        """Return whether any token ``fits``."""
        ...

    def ending_token(self) -> int | None:
        """Return the first token of a short way to the end of the answer; None if it can end here, or no way is known."""
        ...


class Grammars(Protocol):
    """Compiles grammars for one tokenizer. Any thread may call."""

    times: MaskTimes
    init_seconds: float
    """The time to read the vocabulary and to prepare the compiler for it."""

    @property
    def special(self) -> Collection[int]:
        """The ids of special tokens, which are no text."""
        ...

    def matcher(
        self, grammar: Grammar, vocab_size: int, max_new_tokens: int | None = None, finishes: bool = False
    ) -> AnswerMatcher:
        """Return the place of an answer at the beginning of a grammar.

        Raises:
            GenerationConfigError: it cannot be compiled, or has no answer of at most ``max_new_tokens`` tokens.
        """
        ...


@dataclass(frozen=True)
class Mask:
    """The tokens that may follow: ``few`` ids if they are few, otherwise all but ``forbidden``, bool ``[vocab]``."""

    few: NDArray[np.intp] | None
    forbidden: NDArray[np.bool_] | None = None


class GrammarMask:
    """Forbids the tokens that a grammar does not allow. It belongs to one answer.

    ``prepare`` finds the next mask while the device runs; otherwise ``process`` does. Special tokens among
    ``stop_token_ids`` are allowed where the answer may end, or where the grammar has them. Any other one is text, which is
    allowed where the grammar allows it.

    With ``num_left``, the most tokens of the answer, it ``refuses`` those after which the answer could not end in time.
    """

    remedy = "let the grammar allow more, or raise top_k and the like"
    is_active = True

    def __init__(
        self,
        matcher: AnswerMatcher,
        stop_token_ids: Collection[int],
        special: Collection[int],
        vocab_size: int,
        times: MaskTimes | None = None,
        num_left: int | None = None,
    ) -> None:
        self.matcher = matcher
        self._num_left = num_left
        self._times = times or MaskTimes()
        ends = {token for token in stop_token_ids if token < vocab_size and token in special}
        if not ends:
            raise GenerationConfigError(
                "a grammar without a token that ends the answer: set eos_token_id, or stop_token_ids with a special token"
            )
        self._ends = np.array(sorted(ends), np.intp)
        self._chosen: list[int] = []  # tokens of the answer that the matcher does not know yet
        self._forced: list[int] | None = None  # what must follow, which the matcher knows already; None if not known
        self._is_shortest = False  # whether the forced token is one of several with the same text, which are more
        self._mask: Mask | None = None  # what may follow after the forced tokens; None if not known
        self._error: GenerationConfigError | None = None

    def clone(self) -> GrammarMask:
        """Return a processor at the same place of the same grammar, for another answer that begins alike."""
        cloned = copy.copy(self)
        cloned.matcher = self.matcher.clone()
        cloned._chosen = list(self._chosen)
        cloned._forced = None if self._forced is None else list(self._forced)
        return cloned

    def prepare(self) -> None:
        """Find the next mask, while the device computes the logits. After forced tokens it is that of the token after them."""
        if self._mask is not None or self._error is not None:
            return
        begin = time.perf_counter()
        self._find_mask()
        self._times.num_hidden += 1
        self._times.hidden += time.perf_counter() - begin

    def process(self, logits: NDArray[np.float32]) -> None:
        """Set the logits ``[vocab]`` of forbidden tokens to -inf.

        Raises:
            GrammarLimitError: the grammar became too complex.
        """
        if not self._forced and self._mask is None and self._error is None:
            begin = time.perf_counter()
            self._find_mask()
            self._times.num_exposed += 1
            self._times.exposed += time.perf_counter() - begin
        if self._forced:
            _keep_only(logits, np.array(self._forced[:1], np.intp))
            return
        if self._error is not None:
            raise self._error
        assert self._mask is not None
        if self._mask.few is not None:
            _keep_only(logits, self._mask.few)
        else:
            assert self._mask.forbidden is not None
            np.copyto(logits, -np.inf, where=self._mask.forbidden)

    def refuses(self, token: int) -> bool:
        """Return whether the answer could not end in time after ``token``, which ``process`` allows."""
        if self._num_left is None or self._forced or token in self._ends:
            return False
        return not self.matcher.fits([token], self._num_left - 1)

    def keep_ending(self, logits: NDArray[np.float32]) -> None:
        """Set the logits ``[vocab]`` of all tokens to -inf but that of a short way to the end, if this one is not there."""
        token = self.matcher.ending_token()
        kept = self._ends if token is None else np.array([token], np.intp)
        if logits[kept].max() > -np.inf:
            _keep_only(logits, kept)

    def keep_fitting(self, logits: NDArray[np.float32], count: int) -> None:
        """Set the logits ``[vocab]`` of tokens that it refuses to -inf; the ``count`` largest of the others are kept.

        Few tokens are tried. If none of them is left, the answer goes a short way to its end.
        """
        if self._num_left is None or self._forced or self.matcher.is_far(self._num_left - 1):
            return
        best = np.argsort(-logits, kind="stable")[: count + MAX_REFUSED]
        kept: list[int] = []
        num_refused = 0
        for token in best[logits[best] > -np.inf].tolist():
            if num_refused < MAX_REFUSED and len(kept) < count:
                is_refused = self.refuses(token)
                num_refused += is_refused
                kept += [] if is_refused else [token]
        if kept:
            _keep_only(logits, np.array(kept, np.intp))
        else:
            self.keep_ending(logits)

    @property
    def is_whole(self) -> bool:
        """Whether the answer so far is a whole one and nothing can follow; False if it may be cut off anyway."""
        if self._num_left is None:
            return False
        if self._forced is None and self._error is None:
            self._find_forced()
        return self._error is None and self.matcher.is_at_end and {*(self._forced or ())} <= {*self._ends.tolist()}

    def accept(self, token: int) -> None:
        """Go on by the token that was chosen. The matcher learns of it with the next mask, unless it was forced."""
        if self._num_left is not None:
            self._num_left -= 1
        if self._forced:
            assert token == self._forced[0], "the mask allowed no other token"
            self._forced = self._forced[1:]
            if self._is_shortest and not self._forced:
                self._forced = None
                self._mask = None
        elif token not in self._ends:
            self._chosen.append(token)
            self._forced = None
            self._mask = None

    def forced_tokens(self, limit: int) -> list[int]:
        """Return at most ``limit`` tokens that must follow, whatever the logits are; the end of the answer counts too.

        This takes less time than a mask. The time counts as exposed, because it is called between two device calls.
        """
        if self._forced is None and self._error is None:
            begin = time.perf_counter()
            self._find_forced()
            self._times.exposed += time.perf_counter() - begin
        return (self._forced or [])[:limit]

    def _find_forced(self) -> None:
        """Find the tokens that must follow, and let the matcher go on to the end of them."""
        chosen = self._chosen
        self._chosen = []
        self._forced = []
        self._is_shortest = False
        try:
            if chosen:
                self.matcher.accept(chosen)
            forced = self.matcher.forced()
            if forced and self._num_left is not None and not self.matcher.fits(forced, self._num_left - len(forced)):
                token = (
                    self.matcher.ending_token()
                )  # fewer tokens have the same text; the mask would allow none of them
                forced = [] if token is None else [token]
                self._is_shortest = True
            if forced:
                self.matcher.accept(forced)
            if self.matcher.is_at_end and len(self._ends) == 1:
                forced.append(int(self._ends[0]))
            self._forced = forced
        except GenerationConfigError as error:
            self._error = error

    def _find_mask(self) -> None:
        """Find the mask after the forced tokens. An error is kept for ``process``, which ends only this answer."""
        if self._forced is None:
            self._find_forced()
        if self._error is not None:
            return
        try:
            allowed = self.matcher.allowed()
            if self.matcher.can_end:
                allowed[self._ends] = True
            few = np.flatnonzero(allowed) if np.count_nonzero(allowed) <= FEW else None
            self._mask = Mask(few, None if few is not None else ~allowed)
        except GenerationConfigError as error:
            self._error = error


class ForcedTokens(Generic[Draft]):
    """A drafter of one answer. All of its tokens are accepted, if they are checked with the sampler that has the same mask.

    ``make`` returns the draft of tokens, which may be none.
    """

    can_pause = False

    def __init__(self, mask: GrammarMask, make: Callable[[tuple[int, ...]], Draft]) -> None:
        self._mask = mask
        self._make = make

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """Return a draft of at most ``limit`` tokens that must follow ``tokens``, the prompt and the answer so far.

        The mask knows these tokens: the sampler has told it each one that it chose.
        """
        return self._make(tuple(self._mask.forced_tokens(limit)))

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Learn nothing: the grammar alone decides."""

    def forget(self) -> None:
        """Forget nothing: a conversation that was shortened goes on at the same place of its grammar."""


def _keep_only(logits: NDArray[np.float32], tokens: NDArray[np.intp]) -> None:
    kept = logits[tokens]
    logits.fill(-np.inf)
    logits[tokens] = kept

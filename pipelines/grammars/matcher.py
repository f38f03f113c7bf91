"""Follows one answer through its grammar with llguidance."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import GenerationConfigError

from ..generation.grammar_mask import GrammarLimitError
from .endings import GrammarEndings, ShortestEnding

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_MESSAGE = 300
MAX_PIECE = 80
TRIED_TOKENS = 3
"""The tokens of an answer that a grammar is tried with, so that one that is too complex is refused at once."""
ENDLESS = "ff_tokens"
"""What llguidance says of tokens that must follow each other forever; ``TokenBounds`` finds that too, and has better words."""
MISMATCH = "doesn't satisfy the grammar"
"""What llguidance says of a token that does not match."""
_IN_REGEX = "regex parse error:"


class Matcher:
    """An ``AnswerMatcher`` of one grammar. ``end`` is the end token of llguidance's tokenizer.

    ``ending`` is the answer's; None if it may be cut off.
    """

    def __init__(
        self, inner: LLMatcher, vocab_size: int, end: int | None, ending: ShortestEnding | None = None
    ) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self._end = end
        self._ending = ending

    def clone(self) -> Matcher:
        ending = None if self._ending is None else self._ending.clone()
        return Matcher(self._inner.deep_copy(), self._vocab_size, self._end, ending)

    def with_ending(self, endings: GrammarEndings) -> Matcher:
        """Return a matcher at the beginning of an answer that can end in time, from one that is there."""
        return Matcher(self._inner.deep_copy(), self._vocab_size, self._end, ShortestEnding(endings))

    @property
    def is_used_up(self) -> bool:
        """Whether an answer of a copy has brought llguidance to its limits, which all copies share; they all fail then."""
        return bool(error_ahead(self._inner))

    @property
    def can_end(self) -> bool:
        return bool(self._inner.is_accepting())

    @property
    def is_at_end(self) -> bool:
        return bool(self._inner.is_stopped()) and not self._inner.is_error()

    def allowed(self) -> NDArray[np.bool_]:
        if self.is_at_end:
            return np.zeros(self._vocab_size, bool)
        bits = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=min(len(bits) * 8, self._vocab_size), bitorder="little").view(bool)
        if len(allowed) < self._vocab_size:
            allowed = np.concatenate([allowed, np.zeros(self._vocab_size - len(allowed), bool)])
        if self._end is not None and self._end < self._vocab_size:
            allowed[self._end] = False
        return allowed

    def forced(self) -> list[int]:
        return [] if self._inner.is_stopped() else list(self._inner.compute_ff_tokens())

    def accept(self, tokens: Sequence[int]) -> None:
        if not self._inner.consume_tokens(list(tokens)):
            self._check()
        if self._ending is not None:
            self._ending.accept(tokens)

    def fits(self, tokens: Sequence[int], num_left: int) -> bool:
        return self._ending is None or self._ending.fits(tokens, num_left)

    def is_far(self, num_left: int) -> bool:
        return self._ending is None or self._ending.is_far(num_left)

    def ending_token(self) -> int | None:
        found = None if self._ending is None else self._ending.find()
        return None if found is None else found.token

    def _check(self) -> None:
        if self._inner.is_error():
            reason = first_line(self._inner.get_error())
            kind = GenerationConfigError if MISMATCH in reason else GrammarLimitError
            raise kind(f"the grammar cannot go on: {reason}")


class LeadMatcher:
    """An ``AnswerMatcher`` of what comes before an answer proper, and of the answer.

    ``stages`` follow each other: the opening, the reasoning up to its end, the answer; the first two may be missing. After
    ``max_tokens`` tokens the reasoning must end, so that the answer has room: then ``closing`` follows, which is only that end.
    It is None where there is no reasoning. What comes before the answer always fits, because the answer has its room.
    """

    def __init__(self, stages: Sequence[Matcher], closing: Matcher | None, max_tokens: int) -> None:
        self._now, *rest = stages
        self._rest: tuple[Matcher, ...] = tuple(rest)
        self._closing = closing
        self._num_left = max_tokens
        self._go_on()

    def clone(self) -> LeadMatcher:
        cloned = copy.copy(self)
        cloned._now = self._now.clone()  # the others are at their beginning, and are cloned before they follow
        return cloned

    def _go_on(self) -> None:
        """Let the next matcher follow if this one is at its end, or if the reasoning has all its tokens."""
        if not self._rest:
            return
        if self._now.is_at_end:
            self._now, *rest = self._rest
            self._now = self._now.clone()
            self._rest = tuple(rest)
            self._go_on()
        elif self._is_reasoning and self._num_left <= 0:
            assert self._closing is not None
            if self._can_close(self._closing):
                self._now = self._closing.clone()
                self._closing = None

    @property
    def _is_reasoning(self) -> bool:
        """Whether the reasoning is the stage that runs, and not its end alone."""
        return self._closing is not None and len(self._rest) == 1

    def _can_close(self, closing: Matcher) -> bool:
        """Return whether the end of the reasoning can be the next token; within a character of several tokens it cannot."""
        return bool((self._now.allowed() & closing.allowed()).any())

    @property
    def can_end(self) -> bool:
        return not self._rest and self._now.can_end

    @property
    def is_at_end(self) -> bool:
        return not self._rest and self._now.is_at_end

    def allowed(self) -> NDArray[np.bool_]:
        return self._now.allowed()

    def forced(self) -> list[int]:
        return self._now.forced()

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._now.accept([token])
            self._num_left -= self._is_reasoning
            self._go_on()

    def fits(self, tokens: Sequence[int], num_left: int) -> bool:
        return bool(self._rest) or self._now.fits(tokens, num_left)

    def is_far(self, num_left: int) -> bool:
        return bool(self._rest) or self._now.is_far(num_left)

    def ending_token(self) -> int | None:
        return None if self._rest else self._now.ending_token()


def error_ahead(start: LLMatcher) -> str:
    """Return the error of llguidance after the next tokens of one answer, for example of too many choices; "" without one."""
    inner = start.deep_copy()
    for _ in range(TRIED_TOKENS):
        if inner.is_stopped():
            break
        bits = np.frombuffer(inner.compute_bitmask(), np.uint8)
        tokens = np.flatnonzero(np.unpackbits(bits, bitorder="little"))[:1].tolist()
        if inner.is_error() or not tokens or not inner.consume_tokens(tokens):
            break
    message = str(inner.get_error())
    return "" if ENDLESS in message else message


def first_line(message: str) -> str:
    """Return the first line of a message; llguidance appends its state and the grammar.

    Of an error in a regular expression, return the reason, and what it is about.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "no reason was given"
    if lines[0].endswith(_IN_REGEX):
        return _regex_reason(message) or lines[0][:MAX_MESSAGE]
    return lines[0][:MAX_MESSAGE]


def _regex_reason(message: str) -> str:
    """Return the reason in an error of Rust's regex parser, which shows the expression and marks a part of it; "" without one."""
    lines = message.partition(_IN_REGEX)[2].splitlines()
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    place = next((index for index, line in enumerate(lines) if line.strip() and not line.strip(" ^")), 0)
    if not reason or not place:
        return reason[:MAX_MESSAGE]
    begin = lines[place].find("^")
    end = lines[place].rfind("^") + 1
    return f"{reason[:MAX_MESSAGE]}: {lines[place - 1][begin:end][:MAX_PIECE]!r}"

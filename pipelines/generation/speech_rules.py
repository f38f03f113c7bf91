"""Whisper's rules for the next token: plain values of a request, of which an engine makes logits processors.

Tokens that are never chosen, and those that are not chosen first, are second uses of ``BadWords`` and ``MinNewTokens``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from .filters import Logits
from .logits_processors import BadWords, LogitsProcessor, MinNewTokens


@dataclass(frozen=True)
class TimestampParams:
    """How timestamps are written, in steps of 0.02 s."""

    eos: int
    """Ends a text."""
    begin: int
    """0.00 s; the token before it says that there are no timestamps."""
    max_initial_index: int = 50
    """The last timestamp with which a window begins."""


@dataclass(frozen=True)
class SpeechRules:
    """The rules for the text of one window."""

    begin_suppress_tokens: tuple[int, ...] = ()
    """Tokens that are not chosen first."""
    suppress_tokens: tuple[int, ...] = ()
    """Tokens that are never chosen."""
    allowed_tokens: tuple[int, ...] = ()
    """Tokens of which one is chosen; empty for no such limit."""
    timestamps: TimestampParams | None = None
    """How timestamps are written; None for text without any."""

    def processors(self, vocab_size: int) -> list[LogitsProcessor]:
        """Return new processors for one answer, in the order of GenAI."""
        processors: list[LogitsProcessor] = []
        if self.begin_suppress_tokens:
            processors.append(BeginSuppressTokens(self.begin_suppress_tokens, vocab_size))
        if self.suppress_tokens:
            processors.append(SuppressTokens(self.suppress_tokens, vocab_size))
        if self.allowed_tokens:
            processors.append(AllowedTokens(self.allowed_tokens, vocab_size))
        if self.timestamps is not None:
            processors.append(TimestampRules(self.timestamps))
        return processors


class SuppressTokens(BadWords):
    """Forbids tokens that are no speech: ``suppress_tokens``."""

    remedy = "shorten suppress_tokens"

    def __init__(self, tokens: Collection[int], vocab_size: int) -> None:
        super().__init__([(token,) for token in tokens], (), vocab_size)


class BeginSuppressTokens(MinNewTokens):
    """Forbids some tokens as the first one: ``begin_suppress_tokens``."""

    remedy = "shorten begin_suppress_tokens"

    def __init__(self, tokens: Collection[int], vocab_size: int) -> None:
        super().__init__(1, tokens, vocab_size)


class AllowedTokens:
    """Forbids all tokens but some."""

    remedy = "allow tokens of the model's vocabulary"
    is_active = True

    def __init__(self, tokens: Collection[int], vocab_size: int) -> None:
        self._is_forbidden = np.ones(vocab_size, bool)
        self._is_forbidden[[token for token in tokens if token < vocab_size]] = False

    def process(self, logits: Logits) -> None:
        logits[self._is_forbidden] = -np.inf

    def accept(self, token: int) -> None:
        pass


class TimestampRules:
    """Makes the tokens of a window a sequence of segments, each text between its two timestamps (arXiv 2212.04356, figure 1).

    A window begins with a timestamp up to ``max_initial_index``. Timestamps come in pairs, the end of a segment and the beginning
    of the next, or one before the end of the window, and never decrease. If all timestamps together are more likely than the most
    likely other token, one of them is chosen.
    """

    remedy = "shorten suppress_tokens, logit_bias and bad_words"
    is_active = True

    def __init__(self, params: TimestampParams) -> None:
        self._params = params
        self._num_generated = 0
        self._was_timestamp = False
        self._was_before = True  # whether the token before the last one was a timestamp; also if there is none
        self._latest = -1

    def process(self, logits: Logits) -> None:
        begin = self._params.begin
        if begin >= len(logits):
            return
        logits[begin - 1] = -np.inf
        if self._num_generated == 0:
            logits[:begin] = -np.inf
            logits[begin + self._params.max_initial_index + 1 :] = -np.inf
            return
        if self._was_timestamp and self._was_before:
            logits[begin:] = -np.inf
            return
        if self._was_timestamp:
            logits[: self._params.eos] = -np.inf
        if self._latest >= 0:
            is_end = self._was_timestamp  # of a segment: the next one may begin there, too
            logits[begin : self._latest + (not is_end)] = -np.inf
        if log_sum_exp(logits[begin:]) > logits[:begin].max():
            logits[:begin] = -np.inf

    def accept(self, token: int) -> None:
        self._was_before = self._was_timestamp or self._num_generated == 0
        self._was_timestamp = token >= self._params.begin
        self._num_generated += 1
        if self._was_timestamp:
            self._latest = token


def log_sum_exp(logits: Logits) -> float:
    """Return the logarithm of the sum of ``exp(logits [n])``; -inf if all are -inf."""
    most = float(logits.max(initial=-np.inf))
    return most if np.isinf(most) else most + float(np.log(np.exp(logits - np.float32(most)).sum(dtype=np.float64)))

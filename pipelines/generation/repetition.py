"""Logits processors against sequences that repeat: n-grams that may not occur twice, and the DRY penalty."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from staticllm.pipelines.generation.filters import IntArray, Logits

MAX_EXPONENT = 88.0
"""The largest natural logarithm of a DRY penalty without its multiplier, so that float32 can hold it (as in llamacpp)."""


class TokenHistory:
    """The tokens of prompt and answer as a numpy array that grows."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: IntArray = np.array([*tokens, *[0] * (64 + len(tokens) // 2)], np.intp)
        self._count = len(tokens)

    def add(self, token: int) -> None:
        """Add a token."""
        if self._count == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._tokens[self._count] = token
        self._count += 1

    def last(self, count: int, end: int | None = None) -> IntArray:
        """Return the last ``count`` tokens before index ``end``, or all if there are fewer; None for the end of the history."""
        end = self._count if end is None else end
        return self._tokens[max(0, end - count) : end]

    def __len__(self) -> int:
        return self._count


class BadWords:
    """Forbids token sequences: the last token of each, where the tokens before it are the last ones of prompt and answer."""

    remedy = "shorten bad_words or logit_bias"

    def __init__(self, sequences: Iterable[Sequence[int]], prompt: Sequence[int], vocab_size: int) -> None:
        known = [tuple(sequence) for sequence in sequences if max(sequence, default=vocab_size) < vocab_size]
        self._single = np.array(sorted({sequence[0] for sequence in known if len(sequence) == 1}), np.intp)
        self._long: dict[tuple[int, ...], list[int]] = defaultdict(list)  # the last tokens, by those before them
        for sequence in known:
            if len(sequence) > 1:
                self._long[sequence[:-1]].append(sequence[-1])
        self._lengths = sorted({len(head) for head in self._long})
        self._longest = max(self._lengths, default=0)
        self._last = list(prompt[max(0, len(prompt) - self._longest) :])
        self._forbidden = self._find()

    @property
    def is_active(self) -> bool:
        return self._forbidden.size > 0

    def process(self, logits: Logits) -> None:
        logits[self._forbidden] = -np.inf

    def accept(self, token: int) -> None:
        if self._longest:
            self._last = [*self._last, token][-self._longest :]
            self._forbidden = self._find()

    def _find(self) -> IntArray:
        heads = (tuple(self._last[-length:]) for length in self._lengths if length <= len(self._last))
        found = [token for head in heads for token in self._long.get(head, ())]
        return np.concatenate([self._single, np.array(found, np.intp)])


class NoRepeatNgrams:
    """Forbids every token that would make a sequence of ``size`` tokens occur a second time in prompt and answer."""

    remedy = "raise no_repeat_ngram_size"

    def __init__(self, size: int, prompt: Sequence[int]) -> None:
        self._size = size
        self._followers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._last: tuple[int, ...] = ()
        for token in prompt:
            self.accept(token)

    @property
    def is_active(self) -> bool:
        return self._last in self._followers

    def process(self, logits: Logits) -> None:
        logits[self._followers[self._last]] = -np.inf

    def accept(self, token: int) -> None:
        if len(self._last) == self._size - 1:
            self._followers[self._last].append(token)
        self._last = (*self._last, token)[-self._size + 1 :] if self._size > 1 else ()


class DryPenalty:
    """Makes tokens less likely that would continue a sequence which occurred before (DRY: "don't repeat yourself").

    Take the last ``last_n`` tokens of prompt and answer (-1: all). If the ``n`` tokens at their end also occur earlier, the
    token after that earlier place loses ``multiplier * base ** (n - allowed_length)``, for the longest such ``n`` of at least
    ``allowed_length``. ``n`` never reaches back over a breaker, a token sequence such as that of a line break.
    """

    remedy = ""

    def __init__(
        self,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        breakers: Iterable[Sequence[int]],
        prompt: Sequence[int],
    ) -> None:
        self._multiplier = multiplier
        self._base = base
        self._allowed = allowed_length
        self._last_n = 1 << 62 if last_n < 0 else last_n
        self._most = MAX_EXPONENT / float(np.log(base)) if base > 1.000001 else 0.0  # of n - allowed_length
        self._breakers: dict[int, set[tuple[int, ...]]] = defaultdict(set)  # by their last token
        for breaker in breakers:
            if breaker:
                self._breakers[breaker[-1]].add(tuple(breaker))
        self._history = TokenHistory(prompt)
        self._num_unbroken = self._count_unbroken()

    @property
    def is_active(self) -> bool:
        return min(self._num_unbroken, len(self._history) - 1, self._last_n - 1) >= self._allowed

    def process(self, logits: Logits) -> None:
        tokens = self._history.last(self._last_n)
        limit = min(self._num_unbroken, int(self._most) + self._allowed)
        lengths = repeated_lengths(tokens, limit)
        places = np.flatnonzero(lengths >= self._allowed)
        found, index = np.unique(tokens[places + 1], return_inverse=True)
        longest = np.zeros(len(found))
        np.maximum.at(longest, index, lengths[places])
        logits[found] -= (self._multiplier * self._base ** (longest - self._allowed)).astype(np.float32)

    def accept(self, token: int) -> None:
        self._history.add(token)
        self._num_unbroken = 0 if self._is_broken_at(len(self._history)) else self._num_unbroken + 1

    def _is_broken_at(self, end: int) -> bool:
        """Return whether a breaker ends with the token before index ``end``."""
        candidates = self._breakers.get(int(self._history.last(1, end)[0]), ())
        return any(tuple(self._history.last(len(each), end).tolist()) == each for each in candidates)

    def _count_unbroken(self) -> int:
        """Return the number of tokens after the last breaker."""
        for end in range(len(self._history), 0, -1):
            if self._is_broken_at(end):
                return len(self._history) - end
        return len(self._history)


def repeated_lengths(tokens: IntArray, limit: int) -> NDArray[np.intp]:
    """Return for each index of ``tokens [n]`` but the last how many tokens up to it equal those at the end, ``[n - 1]``.

    Lengths above ``limit`` are not told apart from it.
    """
    lengths = np.zeros(max(len(tokens) - 1, 0), np.intp)
    places = np.arange(len(lengths))
    for length in range(min(len(lengths), limit)):
        places = places[places >= length]
        places = places[tokens[places - length] == tokens[len(tokens) - 1 - length]]
        if not len(places):
            break
        lengths[places] += 1
    return lengths

"""Whisper's rules for the next token, as logits processors, and what the first logits of a window tell.

Tokens that are never chosen, and those that are not chosen first, are second uses of ``BadWords`` and ``MinNewTokens``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from staticllm.pipelines.generation.filters import Logits
from staticllm.pipelines.generation.logits_processors import BadWords, LogitsProcessor, MinNewTokens
from staticllm.pipelines.speech.whisper_config import WhisperOptions, WhisperTokens


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


class TimestampRules:
    """Makes the tokens of a window a sequence of segments, each text between its two timestamps (arXiv 2212.04356, figure 1).

    A window begins with a timestamp up to ``max_initial_index``. Timestamps come in pairs, the end of a segment and the beginning
    of the next, or one before the end of the window, and never decrease. If all timestamps together are more likely than the most
    likely other token, one of them is chosen.

    ``generated`` are the tokens that the window has already: a beam or a request that was interrupted goes on after them.
    """

    remedy = "shorten suppress_tokens, logit_bias and bad_words"
    is_active = True

    def __init__(self, tokens: WhisperTokens, max_initial_index: int, generated: Sequence[int] = ()) -> None:
        self._eos = tokens.eos
        self._no_timestamps = tokens.no_timestamps
        self._begin = tokens.timestamp_begin
        self._max_initial_index = max_initial_index
        self._num_generated = 0
        self._was_timestamp = False
        self._was_before = True  # whether the token before the last one was a timestamp; also if there is none
        self._latest = -1
        for token in generated:
            self.accept(token)

    def process(self, logits: Logits) -> None:
        begin = self._begin
        if begin >= len(logits):
            return
        logits[self._no_timestamps] = -np.inf
        if self._num_generated == 0:
            logits[:begin] = -np.inf
            logits[begin + self._max_initial_index + 1 :] = -np.inf
            return
        if self._was_timestamp and self._was_before:
            logits[begin:] = -np.inf
            return
        if self._was_timestamp:
            logits[: self._eos] = -np.inf
        if self._latest >= 0:
            is_end = self._was_timestamp  # of a segment: the next one may begin there, too
            logits[begin : self._latest + (not is_end)] = -np.inf
        if log_sum_exp(logits[begin:]) > logits[:begin].max():
            logits[:begin] = -np.inf

    def accept(self, token: int) -> None:
        self._was_before = self._was_timestamp or self._num_generated == 0
        self._was_timestamp = token >= self._begin
        self._num_generated += 1
        if self._was_timestamp:
            self._latest = token


def log_sum_exp(logits: Logits) -> float:
    """Return the logarithm of the sum of ``exp(logits [n])``; -inf if all are -inf."""
    most = float(logits.max(initial=-np.inf))
    return most if np.isinf(most) else most + float(np.log(np.exp(logits - np.float32(most)).sum(dtype=np.float64)))


def whisper_processors(
    options: WhisperOptions, vocab_size: int, has_timestamps: bool, generated: Sequence[int] = ()
) -> list[LogitsProcessor]:
    """Return the processors of one window, beam or temperature, in the order of GenAI.

    ``has_timestamps``: whether timestamps are generated. ``generated``: the tokens that are there already.
    """
    processors: list[LogitsProcessor] = []
    if options.begin_suppress_tokens and not generated:
        processors.append(BeginSuppressTokens(options.begin_suppress_tokens, vocab_size))
    if options.suppress_tokens:
        processors.append(SuppressTokens(options.suppress_tokens, vocab_size))
    if has_timestamps:
        processors.append(TimestampRules(options.tokens, options.max_initial_timestamp_index, generated))
    return processors


def detected_language(logits: Logits, tokens: WhisperTokens) -> str:
    """Return the code of the most likely language by the logits ``[vocab]`` after ``<|startoftranscript|>``."""
    codes = sorted(tokens.languages)
    ids = np.array([tokens.languages[code] for code in codes], np.intp)
    return codes[int(logits[ids].argmax())]


def no_speech_probability(logits: Logits, tokens: WhisperTokens) -> float:
    """Return the probability of no speech in a window by the unprocessed logits ``[vocab]`` after ``<|startoftranscript|>``."""
    return float(np.exp(float(logits[tokens.no_speech]) - log_sum_exp(logits)))

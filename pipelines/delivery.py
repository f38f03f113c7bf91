"""The reader's side of a request: tokens become text as they come, and the answer is put together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from staticllm.core import FinishReason
from staticllm.metrics import MICRO, PerfMetrics
from staticllm.pipelines.request import Request, Token
from staticllm.pipelines.text_stream import TextStream

if TYPE_CHECKING:
    from staticllm.pipelines.generation_options import GenerationOptions


@dataclass
class Answer:
    """What one request produced. Times are ``time.perf_counter`` seconds."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    score: float = 0.0
    finish_reason: FinishReason = FinishReason.LENGTH
    is_dropped: bool = False  # StreamingStatus.CANCEL: a chat must forget the turn
    token_times: list[float] = field(default_factory=list)
    sampling_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """What may be shown now: confirmed tokens and the text that they add."""

    tokens: list[int]
    text: str


class Delivery:
    """Takes the tokens of one answer. Runs in the reader's thread, so that text costs the device nothing.

    ``wants_text`` may be set at any time; without it, and without stop strings, tokens pass through and nothing is decoded.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], options: GenerationOptions, prompt: list[int], wants_text: bool = True
    ) -> None:
        self._decode = decode
        self.wants_text = wants_text or bool(options.stop_strings)
        self.echo = Piece(prompt, decode(prompt)) if options.echo else None
        self._stream = TextStream(decode, options.stop_strings, options.include_stop_str_in_output)
        self._stop_token_ids = options.stop_token_ids
        self._unsent: list[int] = []
        self._undecoded: list[int] = []
        self.answer = Answer()

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._stream.is_stopped

    @property
    def has_ended(self) -> bool:
        """Whether a stop string or a stop token has come."""
        return self.is_stopped or (bool(self.answer.tokens) and self.answer.tokens[-1] in self._stop_token_ids)

    def push(self, token: Token) -> Piece | None:
        """Add a token; what may be shown now, None if all of it is held back."""
        answer = self.answer
        answer.tokens.append(token.id)
        answer.token_times.append(token.time)
        answer.sampling_seconds.append(token.sampling_seconds)
        answer.score += token.logprob
        self._unsent.append(token.id)
        self._undecoded.append(token.id)
        text = self._text() if self.wants_text else ""
        if self._stream.is_stopped:
            self._keep_tokens_of(self._stream.text)
        if self._stream.is_holding:
            return Piece([], text) if text else None
        tokens, self._unsent = self._unsent, []
        return Piece(tokens, text)

    def finish(self, reason: FinishReason) -> Piece | None:
        """No more tokens come; what is still to be shown."""
        rest = self._text() + self._stream.finish() if self.wants_text else ""
        self.answer.finish_reason = reason
        self.answer.text = self._stream.text
        if reason == FinishReason.CANCELLED or not (rest or self._unsent):
            return None
        tokens, self._unsent = self._unsent, []
        return Piece(tokens, rest)

    def _text(self) -> str:
        """The text that the tokens not decoded yet add."""
        tokens, self._undecoded = self._undecoded, []
        return "".join([self._stream.push(token) for token in tokens])

    def _keep_tokens_of(self, text: str) -> None:
        """After a stop string: drop the tokens at the end that add nothing to the text that is kept."""
        tokens, sent = self.answer.tokens, len(self.answer.tokens) - len(self._unsent)
        while len(tokens) > sent and len(self._decode(tokens[:-1])) >= len(text):
            tokens.pop()
        self._unsent = tokens[sent:]


def metrics_of(answer: Answer, request: Request, load_ms: float, started: float, encoded: float) -> PerfMetrics:
    """GenAI's metrics of one request that began, and whose prompt was encoded, at these ``time.perf_counter`` moments."""
    metrics = PerfMetrics(load_ms)
    metrics.count(request.num_prompt, len(answer.tokens), request.num_cached)
    raw, times = metrics.raw_metrics, answer.token_times
    ended = time.perf_counter()
    decoding = request.decode_seconds[: max(len(times) - 1, 0)]
    raw.generate_durations.append((ended - started) * MICRO)
    raw.tokenization_durations.append((encoded - started) * MICRO)
    raw.inference_durations.append((request.prefill_seconds + sum(decoding)) * MICRO)
    raw.m_times_to_first_token.extend((first - started) * MICRO for first in times[:1])
    raw.m_durations.extend((after - before) * MICRO for before, after in pairwise(times))
    raw.m_new_token_times.extend(moment * 1e3 for moment in times)
    raw.sampling_durations.extend(seconds * MICRO for seconds in answer.sampling_seconds)
    raw.m_batch_sizes.extend([1] * len(times))
    raw.token_infer_durations.extend(seconds * MICRO for seconds in decoding)
    return metrics

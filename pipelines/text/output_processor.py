"""The reader's side of a request: tokens become text as they come, and the answer is put together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from staticllm.core import FinishReason
from staticllm.metrics import MICRO, PerfMetrics
from staticllm.pipelines.engine.request import Request, Token
from staticllm.pipelines.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from staticllm.pipelines.generation.options import GenerationOptions


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
    text_seconds: float | None = None  # detokenization; None while nothing was decoded


@dataclass(frozen=True)
class TextDelta:
    """What may be shown now: confirmed tokens and the text that they add."""

    tokens: list[int]
    text: str


class OutputProcessor:
    """Takes the tokens of one answer. Runs in the reader's thread, so that text costs the device nothing.

    ``wants_text`` may be set at any time; without it, and without stop strings, tokens pass through and nothing is decoded.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], options: GenerationOptions, prompt: list[int], wants_text: bool = True
    ) -> None:
        self.answer = Answer()
        self._decode = decode = self._timed(decode)
        self.wants_text = wants_text or bool(options.stop_strings)
        self.echo = TextDelta(prompt, decode(prompt)) if options.echo else None
        self._stream = IncrementalDetokenizer(decode, options.stop_strings, options.include_stop_str_in_output)
        self._stop_token_ids = options.stop_token_ids
        self._unsent: list[int] = []
        self._undecoded: list[int] = []

    def _timed(self, decode: Callable[[list[int]], str]) -> Callable[[list[int]], str]:
        """``decode``, whose time goes into the answer."""

        def timed(tokens: list[int]) -> str:
            start = time.perf_counter()
            text = decode(tokens)
            self.answer.text_seconds = (self.answer.text_seconds or 0.0) + time.perf_counter() - start
            return text

        return timed

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._stream.is_stopped

    @property
    def has_ended(self) -> bool:
        """Whether a stop string or a stop token has come."""
        return self.is_stopped or (bool(self.answer.tokens) and self.answer.tokens[-1] in self._stop_token_ids)

    def push(self, token: Token) -> TextDelta | None:
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
            return TextDelta([], text) if text else None
        tokens, self._unsent = self._unsent, []
        return TextDelta(tokens, text)

    def finish(self, reason: FinishReason) -> TextDelta | None:
        """No more tokens come; what is still to be shown."""
        rest = self._text() + self._stream.finish() if self.wants_text else ""
        self.answer.finish_reason = reason
        self.answer.text = self._stream.text
        if reason == FinishReason.CANCELLED or not (rest or self._unsent):
            return None
        tokens, self._unsent = self._unsent, []
        return TextDelta(tokens, rest)

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


@dataclass(frozen=True)
class Arrival:
    """When a call began and when its prompt was encoded (``time.perf_counter``), and the seconds of its chat template."""

    started: float
    encoded: float
    template_seconds: float | None


def metrics_of(answer: Answer, request: Request, load_ms: float, arrival: Arrival) -> PerfMetrics:
    """GenAI's metrics of one request."""
    metrics = PerfMetrics(load_ms)
    metrics.count(request.num_prompt, len(answer.tokens), request.num_cached)
    raw, times, started = metrics.raw_metrics, answer.token_times, arrival.started
    ended, template = time.perf_counter(), arrival.template_seconds
    decoding = request.decode_seconds[: max(len(times) - 1, 0)]
    raw.generate_durations.append((ended - started) * MICRO)
    raw.tokenization_durations.append((arrival.encoded - started - (template or 0.0)) * MICRO)
    raw.chat_template_durations.extend([] if template is None else [template * MICRO])
    raw.detokenization_durations.extend([] if answer.text_seconds is None else [answer.text_seconds * MICRO])
    raw.inference_durations.append((request.prefill_seconds + sum(decoding)) * MICRO)
    raw.m_times_to_first_token.extend((first - started) * MICRO for first in times[:1])
    raw.m_durations.extend((after - before) * MICRO for before, after in pairwise(times))
    raw.m_new_token_times.extend(moment * 1e3 for moment in times)
    raw.sampling_durations.extend(seconds * MICRO for seconds in answer.sampling_seconds)
    raw.m_batch_sizes.extend([1] * len(times))
    raw.token_infer_durations.extend(seconds * MICRO for seconds in decoding)
    return metrics

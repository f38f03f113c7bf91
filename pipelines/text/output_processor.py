"""Assembles an answer on the reader's side: tokens, their text, and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from staticllm.core import FinishReason
from staticllm.metrics import MICRO, PerfMetrics
from staticllm.pipelines.engine.output_queue import TokenOutput
from staticllm.pipelines.text.detokenizer import IncrementalDetokenizer
from staticllm.pipelines.text.input_processor import PreparedRequest


@dataclass(frozen=True)
class TextDelta:
    """One increment of an answer: confirmed tokens and the text that they add."""

    tokens: list[int]
    text: str


@dataclass
class RequestOutput:
    """One answer. Times are ``time.perf_counter`` moments, durations are seconds.

    ``echo`` holds the prompt's tokens if they are part of the answer; ``score`` is the sum of the tokens' log-probabilities
    (0.0 unless requested).
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    score: float = 0.0
    finish_reason: FinishReason = FinishReason.LENGTH
    is_dropped: bool = False  # StreamingStatus.CANCEL: a chat removes this turn from its history
    echo: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    sampling_seconds: list[float] = field(default_factory=list)
    device_seconds: list[float] = field(default_factory=list)  # of the calls before each token
    num_cached: int = 0  # prompt tokens found in the prefix cache
    detokenization_seconds: float | None = None  # None while nothing was decoded
    metrics: PerfMetrics = field(default_factory=PerfMetrics)


class OutputProcessor:
    """Collects the tokens of one answer. Runs on the reader's thread, so that decoding text never delays the device.

    ``wants_text`` may be set at any time; without it, and without stop strings, tokens pass through and nothing is decoded.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], prepared: PreparedRequest, load_ms: float = 0.0, index: int = 0
    ) -> None:
        options, prompt = prepared.options, list(prepared.request.prompt)
        self.output = RequestOutput(echo=prompt if options.echo else [])
        self._decode = decode = self._timed(decode)
        self.wants_text = prepared.form != "tokens" or bool(options.stop_strings)
        self.echo = TextDelta(prompt, decode(prompt)) if options.echo else None
        self._prepared, self._load_ms, self._index = prepared, load_ms, index
        self._detokenizer = IncrementalDetokenizer(decode, options.stop_strings, options.include_stop_str_in_output)
        self._unsent: list[int] = []
        self._undecoded: list[int] = []

    def _timed(self, decode: Callable[[list[int]], str]) -> Callable[[list[int]], str]:
        """Wrap ``decode`` so that its time is added to ``detokenization_seconds``."""

        def timed(tokens: list[int]) -> str:
            start = time.perf_counter()
            text = decode(tokens)
            spent = self.output.detokenization_seconds or 0.0
            self.output.detokenization_seconds = spent + time.perf_counter() - start
            return text

        return timed

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._detokenizer.is_stopped

    @property
    def has_ended(self) -> bool:
        """Whether the answer contains a stop string or ends in a stop token."""
        tokens = self.output.tokens
        return self.is_stopped or (bool(tokens) and tokens[-1] in self._prepared.options.stop_token_ids)

    def push(self, token: TokenOutput) -> TextDelta | None:
        """Add a token. Return the increment that may be shown now, None if all of it is held back."""
        output = self.output
        output.tokens.append(token.id)
        output.token_times.append(token.time)
        output.sampling_seconds.append(token.sampling_seconds)
        output.device_seconds.append(token.device_seconds)
        output.num_cached = token.num_cached
        output.score += token.logprob
        self._unsent.append(token.id)
        self._undecoded.append(token.id)
        text = self._text() if self.wants_text else ""
        if self._detokenizer.is_stopped:
            self._keep_tokens_of(self._detokenizer.text)
        if self._detokenizer.is_holding:
            return TextDelta([], text) if text else None
        tokens, self._unsent = self._unsent, []
        return TextDelta(tokens, text)

    def finish(self, reason: FinishReason) -> TextDelta | None:
        """End the answer and fill in its metrics. Return the last increment, None if nothing is left to show."""
        rest = self._text() + self._detokenizer.finish() if self.wants_text else ""
        self.output.finish_reason = reason
        self.output.text = self._detokenizer.text
        self.output.metrics = self._metrics()
        if reason == FinishReason.CANCELLED or not (rest or self._unsent):
            return None
        tokens, self._unsent = self._unsent, []
        return TextDelta(tokens, rest)

    def _text(self) -> str:
        """Decode the tokens that are not decoded yet, and return the text that they add."""
        tokens, self._undecoded = self._undecoded, []
        return "".join([self._detokenizer.push(token) for token in tokens])

    def _keep_tokens_of(self, text: str) -> None:
        """Drop the tokens after a stop string: those at the end that add nothing to the kept text."""
        tokens, sent = self.output.tokens, len(self.output.tokens) - len(self._unsent)
        while len(tokens) > sent and len(self._decode(tokens[:-1])) >= len(text):
            tokens.pop()
        self._unsent = tokens[sent:]

    def _metrics(self) -> PerfMetrics:
        """Return GenAI's metrics of this answer; the prompt is counted with the first answer of a request."""
        output, prepared = self.output, self._prepared
        metrics = PerfMetrics(self._load_ms)
        num_prompt = 0 if self._index else len(prepared.request.prompt)
        metrics.count(num_prompt, len(output.tokens), output.num_cached)
        raw, times, started = metrics.raw_metrics, output.token_times, prepared.started
        template, calls = prepared.template_seconds, output.device_seconds
        raw.generate_durations.append((time.perf_counter() - started) * MICRO)
        raw.tokenization_durations.append((prepared.encoded - started - (template or 0.0)) * MICRO)
        raw.chat_template_durations.extend([] if template is None else [template * MICRO])
        spent = output.detokenization_seconds
        raw.detokenization_durations.extend([] if spent is None else [spent * MICRO])
        raw.inference_durations.append(sum(calls) * MICRO)
        raw.m_times_to_first_token.extend((first - started) * MICRO for first in times[:1])
        raw.m_durations.extend((after - before) * MICRO for before, after in pairwise(times))
        raw.m_new_token_times.extend(moment * 1e3 for moment in times)
        raw.sampling_durations.extend(seconds * MICRO for seconds in output.sampling_seconds)
        raw.m_batch_sizes.extend([1] * len(times))
        raw.token_infer_durations.extend(seconds * MICRO for seconds in calls[1:])
        return metrics

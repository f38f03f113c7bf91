"""The life of one answer: prefill, then sample, deliver, decode until something ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from openvino_genai import StreamingStatus as Status

from staticllm.core import FinishReason
from staticllm.kvcache.sequence import Sequence
from staticllm.metrics import MICRO, PerfMetrics
from staticllm.pipelines.generation_options import GenerationOptions
from staticllm.pipelines.runner import ModelRunner
from staticllm.pipelines.sampler import Sampler
from staticllm.pipelines.streamers import TokenSink
from staticllm.pipelines.text_stream import TextStream


@dataclass
class Answer:
    """What one request produced. Times are ``time.perf_counter`` seconds."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    score: float = 0.0
    finish_reason: FinishReason = FinishReason.LENGTH
    is_dropped: bool = False  # StreamingStatus.CANCEL: a chat must forget the turn
    num_cached: int = 0
    token_times: list[float] = field(default_factory=list)
    sampling_seconds: list[float] = field(default_factory=list)
    device_seconds: list[float] = field(default_factory=list)


class Generation:
    """Generates one answer on a sequence whose rows are a prefix of the prompt."""

    def __init__(
        self,
        runner: ModelRunner,
        sequence: Sequence,
        options: GenerationOptions,
        sampler: Sampler,
        decode: Callable[[list[int]], str],
        sink: TokenSink,
    ) -> None:
        self._runner = runner
        self._sequence = sequence
        self._options = options
        self._sampler = sampler
        self._decode = decode
        self._sink = sink
        self._stream = TextStream(decode, options.stop_strings, options.include_stop_str_in_output)
        self._unsent: list[int] = []
        vocab_size = runner.vocab_size
        self._banned = np.array(sorted(token for token in options.stop_token_ids if token < vocab_size), np.intp)
        self._limit: int | None = None
        self.answer = Answer()

    def run(self, prompt: list[int]) -> Answer:
        """Run to the end. ``prompt`` holds all its tokens, those already in the sequence included."""
        answer = self.answer
        self._limit = self._options.max_tokens_after(len(prompt))
        answer.num_cached = len(self._sequence)
        self._runner.take_device_seconds()
        if self._options.echo:
            self._echo(prompt)
        if self._limit != 0:
            self._generate(prompt[len(self._sequence) :])
        self._finish()
        answer.device_seconds = self._runner.take_device_seconds()
        return answer

    def _generate(self, new_tokens: list[int]) -> None:
        logits = self._runner.prefill(self._sequence, new_tokens)
        while True:
            is_early = len(self.answer.tokens) < self._options.min_new_tokens and self._banned.size > 0
            start = time.perf_counter()
            token, logprob = self._sampler.sample(logits, self._banned if is_early else None)
            self.answer.tokens.append(token)
            self.answer.token_times.append(time.perf_counter())
            self.answer.sampling_seconds.append(self.answer.token_times[-1] - start)
            self.answer.score += logprob
            if self._deliver(token) or self._is_full():
                return
            logits = self._runner.decode(self._sequence, token)

    def _deliver(self, token: int) -> bool:
        """Hand the token on; True if it, its text or the streamer ends the answer."""
        piece = self._stream.push(token)
        self._unsent.append(token)
        if self._stream.is_stopped:
            self._keep_tokens_of(self._stream.text)
        status = Status.RUNNING
        if not self._stream.is_holding:
            status = self._sink.write(self._unsent, piece)
            self._unsent = []
        elif piece:
            status = self._sink.write([], piece)
        if self._stream.is_stopped or token in self._options.stop_token_ids:
            self.answer.finish_reason = FinishReason.STOP
            return True
        if status != Status.RUNNING:
            self.answer.finish_reason = FinishReason.CANCELLED
            self.answer.is_dropped = status == Status.CANCEL
            return True
        return False

    def _keep_tokens_of(self, text: str) -> None:
        """After a stop string: drop the tokens at the end that add nothing to the text that is kept."""
        tokens, sent = self.answer.tokens, len(self.answer.tokens) - len(self._unsent)
        while len(tokens) > sent and len(self._decode(tokens[:-1])) >= len(text):
            tokens.pop()
        self._unsent = tokens[sent:]

    def _is_full(self) -> bool:
        return len(self.answer.tokens) == self._limit or not self._runner.can_decode()

    def _echo(self, prompt: list[int]) -> None:
        self._sink.write(prompt, self._decode(prompt))

    def _finish(self) -> None:
        rest = self._stream.finish()
        is_cancelled = self.answer.finish_reason == FinishReason.CANCELLED
        if (rest or self._unsent) and not is_cancelled:
            self._sink.write(self._unsent, rest)
        self.answer.text = self._stream.text
        self._sink.end()


def metrics_of(answer: Answer, num_input: int, load_ms: float, started: float, encoded: float) -> PerfMetrics:
    """GenAI's metrics of one request that began, and whose prompt was encoded, at these ``time.perf_counter`` moments."""
    metrics = PerfMetrics(load_ms)
    metrics.count(num_input, len(answer.tokens), answer.num_cached)
    raw, times = metrics.raw_metrics, answer.token_times
    raw.generate_durations.append((time.perf_counter() - started) * MICRO)
    raw.tokenization_durations.append((encoded - started) * MICRO)
    raw.inference_durations.append(sum(answer.device_seconds) * MICRO)
    raw.m_times_to_first_token.extend((first - started) * MICRO for first in times[:1])
    raw.m_durations.extend((after - before) * MICRO for before, after in pairwise(times))
    raw.m_new_token_times.extend(moment * 1e3 for moment in times)
    raw.sampling_durations.extend(seconds * MICRO for seconds in answer.sampling_seconds)
    raw.m_batch_sizes.extend([1] * len(times))
    num_prefill_calls = len(answer.device_seconds) - max(len(times) - 1, 0)
    raw.token_infer_durations.extend(seconds * MICRO for seconds in answer.device_seconds[num_prefill_calls:])
    return metrics

"""Assembles an answer on the reader's side: tokens, their text, metrics, and the result objects that ``generate`` returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import pairwise
from operator import add

import openvino_genai as genai

from staticllm.core import FinishReason
from staticllm.events import Event, message_of
from staticllm.metrics import MICRO, PerfMetrics
from staticllm.results import AssistantMessage, DecodedResults, EncodedResults, GeneratedText

from ..engine.request import CompileTimes, TokenOutput
from ..generation.beam_search import beam_score
from ..generation.options.resolve import GenerationOptions
from ..generation.sampler import TopTokens
from .call import PreparedRequest
from .detokenizer import IncrementalDetokenizer
from .inputs import Form


@dataclass(frozen=True)
class CutToken:
    """A token that a stop string cut: as in GenAI it is none of the answer's, but the answer ends with a part of its text."""

    text: str
    logprob: float


@dataclass(frozen=True)
class TextDelta:
    """One increment of an answer: confirmed tokens, the text that they add, and the events of that text if it is parsed."""

    tokens: list[int]
    text: str
    events: list[Event] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """The log-probability of each token (as in ``SampledToken``); it is empty for the prompt (``echo``)."""
    cut: CutToken | None = None
    """The token after them, if a stop string left a part of its text."""
    tops: list[TopTokens] = field(default_factory=list)
    """The most likely tokens at the place of each token."""

    def __add__(self, other: TextDelta) -> TextDelta:
        return joined([self, other])


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """Return increments that follow each other as one."""
    if len(deltas) == 1:
        return deltas[0]
    tokens = [token for delta in deltas for token in delta.tokens]
    events = [event for delta in deltas for event in delta.events]
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
    cut = next((delta.cut for delta in deltas if delta.cut is not None), None)
    tops = [top for delta in deltas for top in delta.tops]
    return TextDelta(tokens, "".join([delta.text for delta in deltas]), events, logprobs, cut, tops)


@dataclass(frozen=True)
class RequestOutput:
    """One answer that has ended. Times are ``time.perf_counter`` moments, durations are seconds.

    ``token_times``, ``sampling_seconds`` and ``device_seconds`` have an entry per chosen token, also for those that a stop
    string cut off.
    """

    tokens: list[int]
    text: str
    score: float
    """The sum of the tokens' log-probabilities (as in ``SampledToken``), for a beam divided by a power of its length."""
    finish_reason: FinishReason
    is_dropped: bool
    """Whether the streamer returned ``StreamingStatus.CANCEL``, so that a chat does not keep this turn."""
    echo: list[int]
    """The prompt's tokens if they are part of the answer."""
    token_times: list[float]
    sampling_seconds: list[float]
    device_seconds: list[float]
    """The time of the device calls since the token before."""
    num_cached: int
    """The number of prompt tokens that the prefix cache had."""
    detokenization_seconds: float | None
    """None if nothing was decoded."""
    metrics: PerfMetrics
    message: AssistantMessage | None = None
    """The parts of the text; None if it was not parsed."""
    logprobs: list[float] = field(default_factory=list)
    """The log-probability of each of ``tokens`` (as in ``SampledToken``)."""
    top_logprobs: list[TopTokens] = field(default_factory=list)
    """The most likely tokens at the place of each of ``tokens``; empty ones unless they were requested."""
    own_seconds: float = 0.0
    """The part of the sum of ``device_seconds`` by the answer's rows in each call."""
    stop_string: str | None = None
    """The stop string that has ended it."""


@dataclass(frozen=True)
class AnswerEnding:
    """The end of an answer: the answer, and its last increment; None if nothing is left to show."""

    output: RequestOutput
    delta: TextDelta | None


class _TimedDecode:
    """Makes text of tokens like ``decode``. ``seconds``: the time that it took; None before the first call."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self.seconds: float | None = None

    def __call__(self, tokens: list[int]) -> str:
        start = time.perf_counter()
        text = self._decode(tokens)
        self.seconds = (self.seconds or 0.0) + time.perf_counter() - start
        return text


class OutputProcessor:
    """Collects the tokens of one answer until ``finish``. Runs on the reader's thread, so that decoding never delays the device.

    Without ``want_text``, and without stop strings, tokens pass through and nothing is decoded.
    """

    def __init__(self, prepared: PreparedRequest, load_ms: float = 0.0, index: int = 0) -> None:
        options = prepared.options
        prompt = list(prepared.request.prompt)
        self._decode = _TimedDecode(prepared.decode)
        self._parser = None if prepared.new_parser is None else prepared.new_parser()
        self._events: list[Event] = []
        self._wants_text = prepared.call.form != "tokens" or bool(options.stop_strings) or self._parser is not None
        self.echo = TextDelta(prompt, self._decode(prompt)) if options.echo else None
        self._prepared = prepared
        self._load_ms = load_ms
        self._index = index
        self._received: list[TokenOutput] = []
        self._tokens: list[int] = []  # of the answer: a stop string cuts off those after it
        self._unsent: list[int] = []
        self._cut: CutToken | None = None  # the token that a stop string cut, until it is sent
        self._undecoded: list[int] = []

    @cached_property
    def _detokenizer(self) -> IncrementalDetokenizer:
        return self._prepared.detokenizer(self._decode)

    def want_text(self) -> None:
        """Decode from now on: the next increment has the text of all tokens so far."""
        self._wants_text = True

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string or the only call has ended the answer."""
        has_called = self._parser is not None and self._parser.has_called
        return self._wants_text and (self._detokenizer.is_stopped or has_called)

    @property
    def num_cached(self) -> int | None:
        """The number of prompt tokens that the prefix cache had; None before the first token."""
        return self._received[0].num_cached if self._received else None

    @property
    def has_ended(self) -> bool:
        """Whether the answer contains a stop string or its only call, or ends in a stop token."""
        tokens = self._tokens
        return self.is_stopped or (bool(tokens) and tokens[-1] in self._prepared.request.stop_token_ids)

    def push(self, token: TokenOutput) -> TextDelta | None:
        """Add a token. Return the increment that may be shown now, None if all of it is held back."""
        self._received.append(token)
        self._tokens.append(token.id)
        self._unsent.append(token.id)
        self._undecoded.append(token.id)
        if not self._wants_text:
            return self._taken("", [])
        text = self._text()
        if self._detokenizer.is_stopped:
            self._keep_tokens_of(self._detokenizer.text)
        if self._detokenizer.is_holding:
            return TextDelta([], text, self._parse(text)) if text else None
        return self._taken(text, self._parse(text))

    def _taken(self, text: str, events: list[Event]) -> TextDelta:
        """Return the tokens that were not sent yet, with this text and these events."""
        tokens = self._unsent
        self._unsent = []
        first = len(self._tokens) - len(tokens)
        received = self._received[first : first + len(tokens)]
        cut = self._cut
        self._cut = None
        logprobs = [token.logprob for token in received]
        return TextDelta(tokens, text, events, logprobs, cut, [token.top for token in received])

    def _parse(self, text: str) -> list[Event]:
        """Parse a piece of the text, and return its events."""
        events = [] if self._parser is None else self._parser.push(text)
        self._events += events
        return events

    def _parse_rest(self, text: str, reason: FinishReason) -> list[Event]:
        """Parse the last piece of the text, and return the last events. A required call stays one where the limit cuts it off."""
        events = self._parse(text)
        if self._parser is None:
            return events
        is_cut = reason == FinishReason.LENGTH and self._prepared.options.extra.tool_options.is_call_required
        last = self._parser.cut() if is_cut else self._parser.finish()
        self._events += last
        return events + last

    def finish(
        self, reason: FinishReason, is_dropped: bool = False, compile_times: CompileTimes | None = None
    ) -> AnswerEnding:
        """End the answer: decode what was held back, and compute the metrics. To be called once."""
        rest = self._text() + self._detokenizer.finish() if self._wants_text else ""
        received = self._received
        options = self._prepared.options
        events = self._parse_rest(rest, reason)
        message = None if self._parser is None else message_of(self._events)
        if message is not None and message.tool_calls and reason == FinishReason.STOP:
            reason = FinishReason.TOOL_CALL
        output = RequestOutput(
            tokens=self._tokens,
            text=self._detokenizer.text if self._wants_text else "",
            score=self._score(),
            finish_reason=reason,
            is_dropped=is_dropped,
            echo=list(self._prepared.request.prompt) if options.echo else [],
            token_times=[token.time for token in received],
            sampling_seconds=[token.sampling_seconds for token in received],
            device_seconds=[token.device_seconds for token in received],
            own_seconds=sum(_own_seconds(token) for token in received),
            num_cached=received[-1].num_cached if received else 0,
            detokenization_seconds=self._decode.seconds,
            metrics=self._metrics(compile_times),
            message=message,
            logprobs=[token.logprob for token in received[: len(self._tokens)]],
            top_logprobs=[token.top for token in received[: len(self._tokens)]],
            stop_string=self._detokenizer.stop_string if self._wants_text else None,
        )
        if reason == FinishReason.CANCELLED or not (rest or self._unsent or events):
            return AnswerEnding(output, None)
        return AnswerEnding(output, self._taken(rest, events))

    def _score(self) -> float:
        total = sum((token.logprob for token in self._received), 0.0)
        beams = self._prepared.options.beams
        return total if beams is None else beam_score(total, max(len(self._received), 1), beams.length_penalty)

    def _text(self) -> str:
        """Decode the tokens that are not decoded yet, and return the text that they add."""
        tokens = self._undecoded
        self._undecoded = []
        return "".join([self._detokenizer.push(token) for token in tokens])

    def _keep_tokens_of(self, text: str) -> None:
        """Drop the tokens at the end that add anything beyond ``text``; as in GenAI, also one that it has a part of."""
        tokens = self._tokens
        sent = len(self._tokens) - len(self._unsent)
        while len(tokens) > sent and len(self._decode(tokens)) > len(text):
            tokens.pop()
        self._unsent = tokens[sent:]
        kept = self._decode(tokens)
        if len(tokens) < len(self._received) and len(kept) < len(text):
            self._cut = CutToken(text[len(kept) :], self._received[len(tokens)].logprob)

    def _metrics(self, compile_times: CompileTimes | None) -> PerfMetrics:
        """Return GenAI's metrics of this answer; the prompt is counted with the first answer of a request."""
        received = self._received
        prepared = self._prepared
        metrics = PerfMetrics(self._load_ms)
        num_prompt = 0 if self._index else len(prepared.request.prompt)
        num_cached, num_recomputed = (received[-1].num_cached, received[-1].num_recomputed) if received else (0, 0)
        metrics.count(num_prompt, len(self._tokens), num_cached, num_recomputed)
        num_drafted = sum(t.num_drafted for t in received)
        num_accepted = sum(t.num_accepted for t in received)
        per_token = [t.draft_seconds / t.num_drafted for t in received for _ in range(t.num_drafted)]
        drafts = prepared.request.drafts
        may_draft = drafts is not None and drafts.uses_model
        metrics.count_drafts(num_drafted, num_accepted, per_token, may_draft)
        if compile_times is not None and not self._index:
            metrics.count_grammar(compile_times.seconds, {compile_times.compiler: compile_times.init_seconds})
        raw = metrics.raw_metrics
        started = prepared.call.started
        times = [token.time for token in received]
        calls = [token.device_seconds for token in received]
        template = prepared.template_seconds
        spent = self._decode.seconds
        raw.generate_durations.append((time.perf_counter() - started) * MICRO)
        raw.tokenization_durations.append((prepared.encoded - started - (template or 0.0)) * MICRO)
        raw.chat_template_durations.extend([] if template is None else [template * MICRO])
        raw.detokenization_durations.extend([] if spent is None else [spent * MICRO])
        raw.inference_durations.append(sum(calls) * MICRO)
        raw.m_times_to_first_token.extend((first - started) * MICRO for first in times[:1])
        raw.m_durations.extend((after - before) * MICRO for before, after in pairwise(times))
        raw.m_new_token_times.extend(moment * 1e3 for moment in times)
        raw.sampling_durations.extend(token.sampling_seconds * MICRO for token in received)
        raw.m_batch_sizes.extend([1] * len(times))
        raw.token_infer_durations.extend(seconds * MICRO for seconds in calls[1:])
        return metrics


def _own_seconds(token: TokenOutput) -> float:
    return token.device_seconds if token.own_seconds is None else token.own_seconds


def kept_outputs(outputs: list[RequestOutput], options: GenerationOptions) -> list[RequestOutput]:
    """Return the answers that were requested: with ``best_of`` the most likely."""
    if options.extra.best_of:
        # the score of no tokens would be the best one, but such an answer had no turn before the request ended
        best = sorted(outputs, key=lambda output: (not output.token_times, -output.score))
        return best[: options.num_return_sequences]
    return outputs


Results = GeneratedText | DecodedResults | EncodedResults


def results_of(
    form: Form,
    outputs: Sequence[RequestOutput],
    decode: Callable[[list[int]], str],
    parsers: Sequence[genai.Parser] = (),
    streamed: dict[str, object] | None = None,
) -> Results:
    """Return ``GeneratedText`` for one answer to a str, ``EncodedResults`` for token ids, else ``DecodedResults``, in order.

    As in GenAI, ``parsers`` run one after the other on each text, and go on from ``streamed``, what a ``TextParserStreamer`` made
    of the only answer; both are for texts only.

    Raises:
        Exception: a parser raised it.
    """
    metrics = reduce(add, (output.metrics for output in outputs))
    scores = [output.score for output in outputs]
    reasons = [output.finish_reason for output in outputs]
    messages = [output.message for output in outputs if output.message is not None]
    if form == "tokens":
        tokens = [output.echo + output.tokens for output in outputs]
        return EncodedResults(tokens, scores, reasons, metrics, messages)
    texts = [(decode(output.echo) if output.echo else "") + output.text for output in outputs]
    parsed = _parsed(texts, parsers, streamed)
    results = DecodedResults(texts, [output.tokens for output in outputs], scores, reasons, metrics, messages, parsed)
    return GeneratedText.of(results) if form == "text" and len(outputs) == 1 else results


def _parsed(
    texts: Sequence[str], parsers: Sequence[genai.Parser], streamed: dict[str, object] | None
) -> list[dict[str, object]]:
    if not parsers:
        return [] if streamed is None else [streamed]
    messages: list[dict[str, object]] = [{"content": text} for text in texts]
    if streamed is not None:
        messages[0] = {"content": texts[0], **streamed}
    for message in messages:
        for parser in parsers:
            parser.parse(message)
    return messages

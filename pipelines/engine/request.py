"""What is asked of an engine (``EngineRequest``), and where the engine stands with it (``RequestState``)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import numpy as np

from staticllm.core import FinishReason
from staticllm.kvcache.sequence import Sequence
from staticllm.pipelines.engine.output_queue import Finished, OutputQueue, TokenOutput, Usage
from staticllm.pipelines.engine.overflow import OverflowRule
from staticllm.pipelines.generation.filters import Logits
from staticllm.pipelines.generation.logits_processors import processors_for
from staticllm.pipelines.generation.sampler import Sampler
from staticllm.pipelines.generation.sampling_params import SamplingParams

_numbers = count(1)


def new_id() -> int:
    """A number that no other request or sequence of this process has."""
    return next(_numbers)


@dataclass(frozen=True)
class EngineRequest:
    """One prompt and what is wanted of it: plain values only, so that a request can cross a process.

    Args:
        prompt: Token ids.
        sampling: How tokens are chosen.
        seed: Seed of the random numbers of the first answer; answer ``i`` has ``seed + i``.
        num_sequences: How many answers; the prompt runs once and its slots are shared.
        max_new_tokens: Tokens per answer; None if only the slots limit them.
        stop_token_ids: Tokens that end an answer, but not among its first ``min_new_tokens``.
        priority: Higher ones are served first.
        deadline: Moment at which it ends, finished or not (``time.perf_counter``).
        overflow: What happens when a conversation fills its slots.
        id: Number of the request.
        arrival: When it came (``time.perf_counter``).
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    num_sequences: int = 1
    max_new_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    priority: int = 0
    deadline: float | None = None
    overflow: OverflowRule = "stop"
    id: int = field(default_factory=new_id)
    arrival: float = field(default_factory=time.perf_counter)

    def to_dict(self) -> dict[str, Any]:
        """The request in the types of JSON."""
        return {**asdict(self), "prompt": list(self.prompt), "stop_token_ids": sorted(self.stop_token_ids)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineRequest:
        """A request that ``to_dict`` described."""
        plain = dict(values)
        prompt, stops = tuple(plain.pop("prompt")), frozenset(plain.pop("stop_token_ids"))
        return cls(prompt, SamplingParams(**plain.pop("sampling")), stop_token_ids=stops, **plain)


class SequenceState:
    """One answer inside the engine. ``tokens`` are prompt and answer so far, as the KV slots will hold them.

    Engine's thread, except ``cancel_reason``, which any thread may set.
    """

    def __init__(self, request: EngineRequest, queue: OutputQueue, vocab_size: int, index: int = 0) -> None:
        self.request, self.index = request, index
        self.id = new_id() if index else request.id
        self.tokens = list(request.prompt)
        self.sequence: Sequence | None = None  # its slots in the arena
        self.cancel_reason: FinishReason | None = None
        self.num_cached = self.num_generated = 0
        self.started: float | None = None
        self.token_times: list[float] = []
        self._prefill_seconds = 0.0
        self._decode_seconds: list[float] = []
        self._queue = queue
        self._unposted: list[TokenOutput] = []
        processors = processors_for(
            request.sampling, request.prompt, vocab_size, request.min_new_tokens, request.stop_token_ids
        )
        self._sampler = Sampler(request.sampling, processors, np.random.default_rng(request.seed + index))

    def choose(self, logits: Logits, argmax: int) -> FinishReason | None:
        """Choose the next token from ``logits [vocab]``. Returns why the answer ends with it, None if it goes on.

        Raises:
            GenerationConfigError: no token is left to choose.
        """
        start = time.perf_counter()
        choice = self._sampler.sample(logits, argmax)
        token, now = choice.token, time.perf_counter()
        self.tokens.append(token)
        self.num_generated += 1
        self.token_times.append(now)
        self._unposted.append(TokenOutput(token, choice.logprob, now, now - start, self.index))
        if token in self.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_generated == self.request.max_new_tokens else None

    def finish_reason_at(self, now: float) -> FinishReason | None:
        """Why it ends now although it could go on: cancelled or late. None if it may go on."""
        if self.cancel_reason is not None:
            return self.cancel_reason
        deadline = self.request.deadline
        return FinishReason.DEADLINE if deadline is not None and now >= deadline else None

    def add_call(self, seconds: float, is_prefill: bool) -> None:
        """Count a device call that it took part in."""
        if is_prefill:
            self._prefill_seconds += seconds
        else:
            self._decode_seconds.append(seconds)

    def post(self) -> None:
        """Hand the tokens chosen since the last time to the reader: while the device runs, so that readers wake up then."""
        for token in self._unposted:
            self._queue.put(token)
        self._unposted.clear()

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Tell the reader that no more tokens come."""
        self.post()
        usage = Usage(self.num_cached, self._prefill_seconds, tuple(self._decode_seconds))
        self._queue.put(Finished(reason, error, self.index, usage))


class RequestState:
    """A request inside the engine: its answers, and the queue through which their tokens leave.

    ``sequences`` holds the first answer at once; the others join when the prompt has run, and share its slots.
    """

    def __init__(self, request: EngineRequest, vocab_size: int, queue: OutputQueue | None = None) -> None:
        self.request, self.queue = request, queue or OutputQueue()
        self._vocab_size = vocab_size
        self._cancel_reason: FinishReason | None = None
        self.num_finished = 0
        self.sequences = [SequenceState(request, self.queue, vocab_size)]

    def fork(self) -> list[SequenceState]:
        """The other answers, once: called when the prompt of the first one has run."""
        first = self.sequences[0]
        for index in range(len(self.sequences), self.request.num_sequences):
            sibling = SequenceState(self.request, self.queue, self._vocab_size, index)
            sibling.started = first.started
            self.sequences.append(sibling)
            sibling.cancel_reason = self._cancel_reason
        return self.sequences[1:]

    def cancel(self, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End one answer, or all of them, before the next device call. Any thread."""
        if index is None:
            self._cancel_reason = reason
        for sequence in self.sequences:
            if index in (None, sequence.index):
                sequence.cancel_reason = reason

    def finish(self, sequence: SequenceState, reason: FinishReason, error: Exception | None = None) -> bool:
        """End one answer; with the first one those that have not begun. True if none is left."""
        sequence.finish(reason, error)
        missing = range(len(self.sequences), self.request.num_sequences)
        for index in missing:
            self.queue.put(Finished(reason, error, index))
        self.num_finished += 1 + len(missing)
        return self.num_finished == self.request.num_sequences

"""One request inside the engine: what it asks for, where it stands, and the output queue through which its tokens leave."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from staticllm.core import FinishReason
from staticllm.kvcache.sequence import Sequence
from staticllm.pipelines.engine.overflow import OverflowRule
from staticllm.pipelines.generation.filters import Logits
from staticllm.pipelines.generation.sampler import Sampler

_numbers = count(1)


@dataclass(frozen=True)
class Token:
    """One chosen token: its log-probability, when it was chosen (``time.perf_counter``) and the seconds that took."""

    id: int
    logprob: float
    time: float
    sampling_seconds: float


@dataclass(frozen=True)
class End:
    """The last thing in a output queue."""

    reason: FinishReason
    error: BaseException | None = None


class OutputQueue:
    """From the engine's thread to whoever reads. ``listener`` is told of every letter, from the engine's thread."""

    def __init__(self) -> None:
        self._outputs: queue.SimpleQueue[Token | End] = queue.SimpleQueue()
        self.listener: Callable[[], None] | None = None

    def put(self, output: Token | End) -> None:
        self._outputs.put(output)
        if self.listener is not None:
            self.listener()

    def get(self, timeout: float | None = None) -> Token | End | None:
        """The next letter; None if there is none within ``timeout`` seconds."""
        try:
            return self._outputs.get(timeout=timeout) if timeout != 0 else self._outputs.get_nowait()
        except queue.Empty:
            return None


@dataclass
class Request:
    """``tokens`` are prompt and answer so far, as the rows will hold them; ``num_prompt`` of them are the prompt.

    ``limit`` is how many tokens may be generated, None if only the rows limit it; ``stop_token_ids`` end it. ``arrival`` and
    ``deadline`` are ``time.perf_counter`` moments. ``watch`` is called with each token and tells
    whether it ends the answer: stop strings.
    """

    tokens: list[int]
    sampler: Sampler
    limit: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    deadline: float | None = None
    overflow: OverflowRule = "stop"
    watch: Callable[[int], bool] | None = None
    id: int = field(default_factory=lambda: next(_numbers))
    arrival: float = field(default_factory=time.perf_counter)
    output_queue: OutputQueue = field(default_factory=OutputQueue)
    is_cancelled: bool = False
    sequence: Sequence | None = None
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: list[float] = field(default_factory=list)
    started: float | None = None
    token_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        self._unposted: list[Token] = []

    def choose(self, logits: Logits, best: int) -> FinishReason | None:
        """Choose the next token; ``best`` is the most likely one. Why the answer ends with it, None if it does not."""
        start = time.perf_counter()
        choice = self.sampler.sample(logits, best)
        token, now = choice.token, time.perf_counter()
        self.tokens.append(token)
        self.num_generated += 1
        self.token_times.append(now)
        self._unposted.append(Token(token, choice.logprob, now, now - start))
        if token in self.stop_token_ids or (self.watch is not None and self.watch(token)):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_generated == self.limit else None

    def finish_reason_at(self, now: float) -> FinishReason | None:
        """Whether it was cancelled or is late; None if it may go on."""
        if self.is_cancelled:
            return FinishReason.CANCELLED
        return FinishReason.DEADLINE if self.deadline is not None and now >= self.deadline else None

    def spent(self, seconds: float, is_prefill: bool) -> None:
        """It took part in a device call."""
        if is_prefill:
            self.prefill_seconds += seconds
        else:
            self.decode_seconds.append(seconds)

    def post(self) -> None:
        """Hand the tokens chosen since the last time to the reader: while the device runs, so that readers wake up then."""
        for token in self._unposted:
            self.output_queue.put(token)
        self._unposted.clear()

    def end(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Tell the reader that nothing more comes."""
        self.post()
        self.output_queue.put(End(reason, error))

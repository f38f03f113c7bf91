"""Clients that choose tokens themselves: they feed the sequences of a simulated engine, and think between two tokens."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from ..engine.client_sequences.state import ClientState, FeedOrder, FeedResult
from ..engine.engine_core import EngineCore
from ..engine.jobs import new_source_id
from ..scheduling.interface import JobView
from .simulated_programs import ANSWER_TOKEN, VirtualClock, prompt_of
from .workload import Arrival


class SimulatedClients:
    """The clients of one core: each sends a prompt, and then one token after another until its answer is long enough."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._due: list[tuple[float, int, ClientState, Arrival]] = []  # a heap of moments at which tokens are sent
        self._numbers = count()
        self._started: dict[int, float | None] = {}  # the first call of each sequence, by its id
        self._done: list[ClientState] = []  # between two calls, these are closed

    @property
    def next_moment(self) -> float | None:
        """The moment at which a client sends its next token; None if none thinks."""
        return self._due[0][0] if self._due else None

    def begin(self, arrival: Arrival) -> int:
        """Send the prompt of a request, and return the number of its sequence."""
        state = self._core.feeds.open(arrival.priority)
        self._feed(state, arrival, prompt_of(arrival), arrival.time)
        return state.id

    def send(self, now: float) -> None:
        """Send the tokens that are due at the moment ``now``."""
        while self._due and self._due[0][0] <= now:
            moment, _, state, arrival = heapq.heappop(self._due)
            self._feed(state, arrival, (ANSWER_TOKEN,), moment)

    def close_done(self) -> None:
        """Close the sequences whose answers are complete."""
        done = self._done
        self._done = []
        for state in done:
            self._core.feeds.close(state, is_reusable=False)

    def started(self, sequence: int) -> float | None:
        """Return the start of the first call of a sequence whose answer is complete; asked once."""
        return self._started.pop(sequence)

    def _feed(self, state: ClientState, arrival: Arrival, tokens: tuple[int, ...], moment: float) -> None:
        self._core.feeds.feed(state, FeedOrder(tokens, "last", partial(self._take, state, arrival), moment))

    def _take(self, state: ClientState, arrival: Arrival, result: FeedResult) -> None:
        """Think about the next token, or end the answer."""
        if result.error is not None:
            raise result.error
        assert arrival.think is not None
        self._started.setdefault(state.id, state.started)
        is_full = len(state.tokens) >= self._core.device.options.max_seq_len
        if is_full or len(state.token_times) >= arrival.num_output:
            self._done.append(state)
        else:
            heapq.heappush(self._due, (self._core.clock() + arrival.think, next(self._numbers), state, arrival))


@dataclass(frozen=True)
class BulkJobs:
    """Calls of another model, such as packed documents, of which one always waits until the moment ``end``."""

    seconds: float
    """The duration of one call; calls are shorter if the device's policy asks for it, at no cost."""
    end: float


class SimulatedJobs:
    """The source of these calls; ``num_calls`` counts those that ran."""

    def __init__(self, jobs: BulkJobs, clock: VirtualClock) -> None:
        self.id = new_source_id()
        self.num_calls = 0
        self._jobs = jobs
        self._clock = clock
        self._next_seconds = jobs.seconds

    @property
    def has_jobs(self) -> bool:
        return self._clock.now < self._jobs.end

    @property
    def wait_seconds(self) -> float:
        """Calls never wait for more texts."""
        return 0.0

    def attach(self, wake: Callable[[], None]) -> None:
        """Do nothing: a call always waits."""

    def next_job(self, max_seconds: float | None = None) -> JobView | None:
        """Return the next call, which takes ``max_seconds`` at most."""
        if not self.has_jobs:
            return None
        seconds = self._jobs.seconds
        self._next_seconds = seconds if max_seconds is None else min(seconds, max_seconds)
        return JobView(self.id, self._next_seconds, 0.0)

    def run_next(self, meanwhile: Callable[[], None] | None = None) -> int:
        """Let the time of one call pass."""
        if meanwhile is not None:
            meanwhile()
        self._clock.advance(self._next_seconds)
        self.num_calls += 1
        return 1

    def close(self) -> None:
        """Do nothing: no part of a call waits for its result."""

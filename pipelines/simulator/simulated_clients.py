"""Clients that choose tokens themselves: they feed the sequences of a simulated engine, and think between two tokens."""

from __future__ import annotations

import heapq
from functools import partial
from itertools import count

from staticllm.pipelines.engine.client_sequences.state import FedState, FeedOrder, FeedResult
from staticllm.pipelines.engine.engine_core import EngineCore
from staticllm.pipelines.simulator.simulated_programs import ANSWER_TOKEN, prompt_of
from staticllm.pipelines.simulator.workload import Arrival


class SimulatedClients:
    """The clients of one core: each sends a prompt, and then one token after another until its answer is long enough."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._due: list[tuple[float, int, FedState, Arrival]] = []  # a heap of moments at which tokens are sent
        self._numbers = count()
        self._started: dict[int, float | None] = {}  # the first call of each sequence, by its id
        self._done: list[FedState] = []  # between two calls, these are closed

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
        done, self._done = self._done, []
        for state in done:
            self._core.feeds.close(state, is_reusable=False)

    def started(self, sequence: int) -> float | None:
        """Return the start of the first call of a sequence whose answer is complete; asked once."""
        return self._started.pop(sequence)

    def _feed(self, state: FedState, arrival: Arrival, tokens: tuple[int, ...], moment: float) -> None:
        self._core.feeds.feed(state, FeedOrder(tokens, "last", partial(self._take, state, arrival), moment))

    def _take(self, state: FedState, arrival: Arrival, result: FeedResult) -> None:
        """Think about the next token, or end the answer."""
        if result.error is not None:
            raise result.error
        assert arrival.think is not None
        self._started.setdefault(state.id, state.started)
        is_full = len(state.tokens) >= self._core.options.max_seq_len
        if is_full or len(state.token_times) >= arrival.num_output:
            self._done.append(state)
        else:
            heapq.heappush(self._due, (self._core.clock() + arrival.think, next(self._numbers), state, arrival))

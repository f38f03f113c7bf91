"""Simulates one device: the engine's core on a virtual clock, over programs that take their time there and compute nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from staticllm.core import FinishReason, Variant
from staticllm.errors import ConfigError, DeviceError

from ...kvcache.stored import StoredSequence
from ..engine.engine import new_state
from ..engine.engine_core import EngineCore
from ..engine.options import EngineOptions
from ..engine.request import EngineRequest, new_id
from ..engine.state import RequestState
from ..generation.beam_search import BeamParams
from ..profiling.records import JobRecord, Record, RequestRecord, StepRecord
from ..programs.variant_index import VariantIndex
from ..scheduling.interface import Policy
from ..scheduling.request_table import Limits
from .cost_model import Blocks, Cost, HostCost
from .simulated_clients import BulkJobs, SimulatedClients, SimulatedJobs
from .simulated_programs import (
    ANSWER_TOKEN,
    VOCAB_SIZE,
    Drafting,
    VirtualClock,
    prompt_of,
    simulated_runner,
)
from .workload import Arrival


@dataclass(frozen=True)
class DeviceModel:
    """The programs, costs and KV slots of a device."""

    index: VariantIndex
    cost: Cost
    limits: Limits
    kv_slots: int
    """The size of the arena."""
    host_kv_slots: int
    """The size of the host pool."""
    max_seq_len: int
    host: HostCost = field(default_factory=HostCost)
    known: Mapping[Variant, float] | None = None
    """The costs with which the policy begins, and which it updates; None if it sees the exact ones."""
    jobs: BulkJobs | None = None
    """Calls of another model."""
    waits_for_batch: bool = True
    """As in ``EngineOptions``."""
    drafting: Drafting | None = None
    prefix_caching: bool = False
    """Whether beams and client sequences that lose their slots are kept in the host pool; prompts never begin alike."""
    blocks: Blocks = field(default_factory=Blocks)
    """How the calls are divided."""

    @property
    def options(self) -> EngineOptions:
        return EngineOptions(
            self.limits, self.max_seq_len, host_kv_slots=self.host_kv_slots, prefix_caching=self.prefix_caching,
            measure_costs=False, waits_for_batch=self.waits_for_batch,
        )  # fmt: skip


@dataclass(frozen=True)
class SimulatedRequest:
    """A request on one device, which it leaves after ``limit`` tokens."""

    arrival: Arrival
    limit: int
    before: RequestRecord | None = None
    """What another device did for it before."""

    @property
    def num_tokens(self) -> int:
        """The number of its tokens when it comes to the device."""
        return self.arrival.num_prompt + (0 if self.before is None else len(self.before.token_times))

    def engine_request(self, max_seq_len: int, drafting: Drafting | None) -> EngineRequest:
        arrival = self.arrival
        return EngineRequest(
            prompt_of(arrival),
            num_sequences=arrival.num_answers,
            max_new_tokens=min(self.limit, max_seq_len - arrival.num_prompt + 1),
            priority=arrival.priority,
            beams=BeamParams(arrival.num_answers) if arrival.are_beams else None,
            drafts=None if drafting is None or arrival.are_beams else drafting.params,
            arrival=arrival.time,
        )


@dataclass
class _Served:
    """A request in the engine; ``num_left`` answers have not ended."""

    request: SimulatedRequest
    state: RequestState | None
    """None if its client chooses the tokens."""
    num_left: int


@dataclass(frozen=True)
class Ended:
    """An answer that leaves the device, and its record."""

    request: SimulatedRequest
    record: RequestRecord


class SimulatedDevice:
    """An engine's core on a clock of its own. ``step`` runs one call, and ``finish`` must be called at the moment of its end.

    In the records, a request has the number of its arrival, and further answers have numbers below 0.
    """

    def __init__(self, model: DeviceModel, policy: Policy) -> None:
        self.model = model
        self.clock = VirtualClock()
        self.steps: list[StepRecord] = []
        self.jobs: list[JobRecord] = []
        self.is_running = False  # a call has begun, and ``finish`` was not called
        self._runner = simulated_runner(
            model.index.variants,
            model.cost,
            model.kv_slots,
            self.clock,
            model.host,
            model.known,
            blocks=model.blocks,
        )
        self.core = EngineCore(self._runner, policy, model.options, self.clock)
        self.core.profiler.trace = self
        self._clients = SimulatedClients(self.core)
        self._jobs = None if model.jobs is None else SimulatedJobs(model.jobs, self.clock)
        if self._jobs is not None:
            self.core.jobs.add(self._jobs)
        if model.drafting is not None:
            drafts = model.drafting.model(model.limits.max_num_seqs, model.max_seq_len, self.clock)
            self.core.device.draft_planner.use_model(drafts)
        self._inbox: deque[SimulatedRequest] = deque()
        self._served: dict[int, _Served] = {}  # by the number in the engine
        self._numbers: dict[int, int] = {}  # of arrivals, by the number in the engine
        self._ended: list[Ended] = []
        self._num_leaving = 0  # requests whose last answers are in ``_ended``
        self._idle_since = float("-inf")

    @property
    def num_requests(self) -> int:
        """The number of requests that have not left the device."""
        return len(self._served) + len(self._inbox) + self._num_leaving

    def submit(self, request: SimulatedRequest) -> None:
        """Add a request, which the next plan can use.

        Raises:
            ConfigError: it needs more KV slots than a sequence or the host pool can have.
        """
        needed = request.num_tokens
        if needed > self.model.max_seq_len:
            raise ConfigError(
                f"a prompt of {needed} tokens: a sequence can have {self.model.max_seq_len} KV slots; raise them"
            )
        if request.before is not None and needed > self.model.host_kv_slots:
            raise ConfigError(
                f"{needed} KV slots arrive at once, HOST_KV_SLOTS is {self.model.host_kv_slots}: raise it"
            )
        self._inbox.append(request)

    def step(self, now: float) -> float | None:
        """Make the engine's next step at the moment ``now``. Return the moment of its end; None if it made no call.

        Raises:
            DeviceError: a request cannot run at all.
        """
        self.clock.now = now
        self._runner.is_waking = now > self._idle_since
        self._admit(now)
        while self.core.has_calls or self.core.device.is_offloading:
            num_calls = self._num_calls
            self.core.step()
            self._clients.close_done()
            self._raise_errors()
            self.is_running = self._num_calls > num_calls
            if self.is_running:
                self._idle_since = self.clock.now
                return self.clock.now
            if self.core.wait_until is not None:
                break
        return None

    def wake_at(self, now: float) -> float | None:
        """Return the moment of the next ``step`` if nothing arrives before; None if only an arrival can be a reason for one."""
        moments = (self._clients.next_moment, self.core.wait_until)
        return min((max(moment, now) for moment in moments if moment is not None), default=None)

    def finish(self) -> list[Ended]:
        """End the step, and return the answers that leave the device."""
        self.is_running = False
        self._num_leaving = 0
        ended = self._ended
        self._ended = []
        return ended

    def close(self) -> None:
        """Let the engine close its policy and its programs."""
        self.core.close()

    def append(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.steps.append(self._renumbered(record))
        elif isinstance(record, JobRecord):
            self.jobs.append(record)
        else:
            self._end(record)

    @property
    def _num_calls(self) -> int:
        return self._runner.num_calls + (0 if self._jobs is None else self._jobs.num_calls)

    def _admit(self, now: float) -> None:
        """Admit submitted requests, and tokens of clients. A request that brings slots waits for room in the host pool."""
        host_pool = self.core.device.kv_manager.host_pool
        while self._inbox:
            request = self._inbox[0]
            if request.before is not None and request.num_tokens - 1 > host_pool.free_slots:
                break
            self._begin(self._inbox.popleft())
        self._clients.send(now)

    def _begin(self, request: SimulatedRequest) -> None:
        arrival = request.arrival
        if arrival.think is not None:
            number = self._clients.begin(arrival)
            state = None
        else:
            asked = request.engine_request(self.model.max_seq_len, self.model.drafting)
            state = new_state(asked, VOCAB_SIZE, clock=self.clock)
            number = asked.id
            if request.before is None:
                self.core.admit(state)
            else:
                self._continue(state, request.before)
        self._numbers[number] = arrival.id
        self._served[number] = _Served(request, state, arrival.num_answers)

    def _continue(self, state: RequestState, before: RequestRecord) -> None:
        """Let a request go on whose prompt, and maybe more, has run on another device."""
        (answer,) = state.sequences
        answer.tokens += [ANSWER_TOKEN] * len(before.token_times)
        answer.token_times += before.token_times
        answer.started = before.started
        self.core.admit_swapped(state, StoredSequence(tuple(answer.tokens[:-1]), ()))

    def _end(self, record: RequestRecord) -> None:
        number = record.id if record.id in self._served else self._first_answer(record.id)
        served = self._served[number]
        arrival = served.request.arrival
        if served.state is None:
            record = replace(record, started=self._clients.started(number))
        own = replace(record, id=self._number_of(record.id), num_prompt=arrival.num_prompt)
        others = arrival.num_answers - 1 if arrival.are_beams else 0
        records = [own, *(replace(own, id=-new_id()) for _ in range(others))]
        self._ended += [Ended(served.request, each) for each in records]
        served.num_left -= len(records)
        if not served.num_left:
            del self._served[number]
            self._num_leaving += 1

    def _raise_errors(self) -> None:
        """Raise the error of an answer that could not run."""
        for ended in self._ended:
            if ended.record.reason is FinishReason.ERROR:
                raise DeviceError(
                    f"request {ended.record.id} of {ended.record.num_prompt} tokens: no program or not enough KV slots for it"
                )

    def _first_answer(self, number: int) -> int:
        """Return the number of the first answer of the request that has this answer."""
        states = {first: served.state for first, served in self._served.items() if served.state is not None}
        return next(first for first, state in states.items() if any(a.id == number for a in state.sequences))

    def _number_of(self, number: int) -> int:
        return self._numbers.get(number, -number)

    def _renumbered(self, record: StepRecord) -> StepRecord:
        number_of = self._number_of
        return replace(
            record,
            decode=tuple(map(number_of, record.decode)),
            prefill=tuple((number_of(number), count) for number, count in record.prefill),
            swapped=tuple(map(number_of, record.swapped)),
            preempted=tuple(map(number_of, record.preempted)),
            drafts=tuple((number_of(number), drafted, accepted) for number, drafted, accepted in record.drafts),
        )

"""What the parts of an engine core share: the state of its device, the requests that it serves, and how a sequence ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from staticllm.core import Clock, FinishReason

from ..profiling.stats import Profiler
from ..programs.model_runner import ModelRunner
from ..scheduling.interface import Device, Policy, View
from ..scheduling.planner import Planner
from ..scheduling.request_table import RequestTable
from .batch import BatchBuilder, Quarantine
from .jobs import JobSources
from .kv_manager import KVCacheManager, make_kv_manager
from .options import EngineOptions
from .sequence import ActiveRequest, SequenceState
from .speculation.draft_planner import DraftPlanner
from .state import AnswerState


@dataclass(frozen=True)
class RunnerState:
    """A runner with an empty request table and an empty KV cache. ``replaced`` gives the state of another runner."""

    runner: ModelRunner
    options: EngineOptions
    table: RequestTable
    kv_manager: KVCacheManager
    quarantine: Quarantine
    draft_planner: DraftPlanner
    batches: BatchBuilder

    @property
    def is_offloading(self) -> bool:
        """Whether cached slots are on their way to the host pool; a step moves them even without requests."""
        return self.kv_manager.prefix.is_offloading

    @property
    def has_unknown_costs(self) -> bool:
        """Whether some variant's cost is not measured and should be."""
        return self.options.measure_costs and not self.runner.probe.is_done

    def replaced(self, runner: ModelRunner, options: EngineOptions, clock: Clock) -> RunnerState:
        """Return the state of another runner; it takes over the draft model, and idle sequences without their slots."""
        other = device_state(runner, options, clock, self.draft_planner)
        other.kv_manager.idle.take_over(self.kv_manager.idle)
        return other


def device_state(
    runner: ModelRunner, options: EngineOptions, clock: Clock, drafts: DraftPlanner | None = None
) -> RunnerState:
    """Return the state of a runner. ``drafts``: the planner whose draft model is used on."""
    table = RequestTable(options.limits)
    manager = make_kv_manager(runner.cache, table, options, clock, lambda: runner.rotations)
    quarantine = Quarantine()
    planner = DraftPlanner(runner, options.max_seq_len, drafts.model if drafts else None)
    batches = BatchBuilder(runner, table, manager, quarantine, planner)
    return RunnerState(runner, options, table, manager, quarantine, planner, batches)


class Outbox:
    """The sequences for which tokens were chosen that their readers do not have yet.

    They wait for the next call: the device idles until it has begun, and its threads keep readers from the cores once it runs. So
    first tokens, for which somebody waits, are handed over before it, the others while it runs.
    """

    def __init__(self) -> None:
        self._states: list[SequenceState] = []

    def add(self, states: Iterable[SequenceState]) -> None:
        """Add sequences with new tokens."""
        self._states += states

    def post_first(self) -> bool:
        """Hand over the first tokens of answers; return whether there were any."""
        first = [state for state in self._states if isinstance(state, AnswerState) and state.num_generated == 1]
        for state in first:
            state.post()
        return bool(first)

    def post(self) -> None:
        """Hand over all tokens."""
        for state in self._states:
            state.post()
        self._states.clear()


class Serving:
    """The requests of one device, and what serves them. One thread at a time.

    Attributes:
        clock: The clock of all moments, also of the requests and of the runner.
        requests: The requests that were admitted and have not ended, by id.
        jobs: The calls of other models.
        device: What belongs to one runner; only ``install`` replaces it.
        preempted: The ids of the requests that lost their slots since the last call.
        outbox: The tokens that readers do not have yet.
    """

    def __init__(self, runner: ModelRunner, policy: Policy, options: EngineOptions, clock: Clock) -> None:
        self.clock = clock
        self.profiler = Profiler()
        self.requests: dict[int, ActiveRequest] = {}
        self.jobs = JobSources()
        self.device = device_state(runner, options, clock)
        self.planner = Planner(policy, options.waits_for_batch)
        self.preempted: list[int] = []
        self.outbox = Outbox()

    def install(self, runner: ModelRunner, options: EngineOptions) -> None:
        """Install a runner, with an empty request table and an empty KV cache. No request may be left."""
        assert not self.requests
        self.device = self.device.replaced(runner, options, self.clock)

    def take_preempted(self) -> list[int]:
        """Return the ids of the requests that lost their slots since the last call, and forget them."""
        preempted = self.preempted
        self.preempted = []
        return preempted

    @property
    def vocab_size(self) -> int:
        """The number of token ids of the model."""
        return self.device.runner.cache.layout.vocab_size

    def view(self) -> View:
        """Return the engine's state as a policy receives it."""
        runner = self.device.runner
        manager = self.device.kv_manager
        manager.count_own_slots()
        device = Device(
            index=runner.index,
            seconds=runner.costs,
            high_slot=runner.cache.num_past,
            is_complete=runner.is_complete,
            swap_seconds=manager.swap_seconds,
            leaving_slots=manager.prefix.leaving_slots,
            num_blocks=runner.num_blocks,
            overrun=runner.costs.overrun,
        )
        view = self.device.table.view(self.clock(), manager.free_slots, manager.host_pool.free_slots, device)
        jobs = self.jobs.views(self.planner.longest_job(view)) if self.jobs.has_jobs else ()
        return replace(view, jobs=jobs, idle=manager.idle.views) if jobs or len(manager.idle) else view

    def end(
        self, state: SequenceState, reason: FinishReason, error: Exception | None = None, is_trusted: bool = True
    ) -> None:
        """End an answer; its slots are kept for their prefix if they can be trusted."""
        if is_trusted:
            self.device.kv_manager.free(state)
        else:
            self.device.kv_manager.discard(state)
        self.device.quarantine.discard(state.id)
        self.report(state, reason, error)

    def report(self, state: SequenceState, reason: FinishReason, error: Exception | None = None) -> None:
        """Record the end of a sequence without slots, and tell its request."""
        if state.is_recorded:
            self.profiler.record(state.record(reason))
        if isinstance(state, AnswerState) and state.drafts is not None:
            self.device.draft_planner.forget(state.id)
        if self.requests[state.request_id].finish(state, reason, error):
            del self.requests[state.request_id]

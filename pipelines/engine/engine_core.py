"""Serves requests on one device, one step at a time: plan, run, choose. It has no thread and no lock."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from staticllm.core import Clock, FinishReason
from staticllm.errors import DeviceError, PromptError, as_ours

from ...kvcache.stored import StoredSequence
from ..programs.model_runner import ModelRunner
from ..scheduling.interface import Plan, Policy, RequestStatus
from ..scheduling.planner import NoPlanError
from .batch import Batch
from .beams import BeamRequest
from .call_runner import CallRunner
from .chooser import Chooser
from .client_sequences.feeds import Feeds
from .device_use import Demand, Rows, demand_of
from .options import EngineOptions
from .sequence import SequenceState
from .serving import RunnerState, Serving
from .state import AnswerState, RequestState


class EngineCore:
    """The requests of one device and the steps that serve them. One thread at a time; in an ``Engine`` the engine's thread.

    It decides what runs; a ``CallRunner`` runs it, and a ``Chooser`` chooses the tokens that follow.

    Attributes:
        serving: What the parts share. ``requests``, ``jobs``, ``profiler``, ``planner`` and ``clock`` are its own.
        feeds: The client sequences.
        searches: The requests that are beam searches, by id.
        wait_until: The moment until which the next step may wait; None if it should follow at once.
    """

    def __init__(
        self, runner: ModelRunner, policy: Policy, options: EngineOptions, clock: Clock = time.perf_counter
    ) -> None:
        self.serving = Serving(runner, policy, options, clock)
        self.clock = clock
        self.requests = self.serving.requests
        self.jobs = self.serving.jobs
        self.profiler = self.serving.profiler
        self.planner = self.serving.planner
        self.feeds = Feeds(self.serving)
        self.calls = CallRunner(self.serving, Chooser(self.serving, self.feeds))
        self.searches: dict[int, BeamRequest] = {}
        self.wait_until: float | None = None
        self._shifting: list[AnswerState] = []  # since the last call, the model must show how keys are moved for them
        self._leaving: set[int] = set()  # windows of cross-attention that are removed once no request sees them

    @property
    def device(self) -> RunnerState:
        """What belongs to the runner that serves now."""
        return self.serving.device

    @property
    def num_waiting(self) -> int:
        """The number of admitted requests that have not begun, however many answers or beams each has; feeds do not count.

        Any thread may read it. One that has read the first token or the end of a request does not find it among them.
        """
        requests = list(self.requests.values())  # in one go; tuple() would let other threads change the dict meanwhile
        return sum(request.is_waiting for request in requests)

    @property
    def has_calls(self) -> bool:
        """Whether ``step`` would use the device."""
        return bool(self.requests) or self.jobs.has_jobs

    @property
    def demand(self) -> Demand:
        """For whom the next step uses the device."""
        return demand_of(self.requests.values(), self.jobs.asked)

    @property
    def rows(self) -> list[Rows]:
        """As ``CallRunner.rows``."""
        return self.calls.rows

    def post(self) -> None:
        """As ``CallRunner.post``."""
        self.calls.post()

    def last_token_times(self) -> list[float]:
        """Return the moment of the last token of each running request, and of each client sequence that is expected back."""
        running = (info.last_token_time for info in self.device.table if info.status is RequestStatus.RUNNING)
        expected = self.device.kv_manager.idle.expected_since(self.clock())
        return [*expected, *(moment for moment in running if moment is not None)]

    def measure_next(self, is_needed: Callable[[], bool]) -> None:
        """Measure the cost of one more variant, without a request; no further call begins once ``is_needed`` is true."""
        self.device.runner.probe.measure_next(is_needed)

    def admit(self, request: RequestState) -> None:
        """Add a request; ``step`` serves it from now on. One without the window that the model needs ends with an error."""
        bank = self.device.runner.cache.cross
        window = request.request.cross_window
        if bank.num_cross_windows and (window not in bank or window in self._leaving):
            self.refuse(
                request, FinishReason.ERROR, PromptError("the request has no window, or its window was removed")
            )
            return
        self.requests[request.id] = request
        if isinstance(request, BeamRequest):
            self.searches[request.id] = request
            # no cycles: they would keep a dropped engine until the collector runs
            request.begin(weakref.proxy(self.feeds), partial(EngineCore.end_search, weakref.proxy(self)))
        else:
            self.device.kv_manager.add(request.sequences[0])
        if request.request.overflow == "context_shift":
            self._shifting.append(request.sequences[0])

    def remove_window(self, window: int) -> None:
        """Remove a window from the bank of cross-attention, once no request sees it; new requests about it are refused."""
        self._leaving.add(window)
        self._remove_windows()

    def _remove_windows(self) -> None:
        if not self._leaving:
            return
        active = (each.request.cross_window for each in self.requests.values() if isinstance(each, RequestState))
        for window in self._leaving.difference(active):
            self.device.runner.cache.cross.remove(window)
            self._leaving.remove(window)

    def admit_swapped(self, request: RequestState, stored: StoredSequence) -> None:
        """Add a request of one answer that another device has served up to now, as ``KVCacheManager.add_swapped``."""
        self.requests[request.id] = request
        self.device.kv_manager.add_swapped(request.sequences[0], stored)

    def step(self, meanwhile: Callable[[], None] | None = None) -> None:
        """End requests that were cancelled or are past their deadline, then run one device call if requests or jobs are left.

        ``meanwhile`` is called once the device has begun. Any exception leaves requests that only ``end_all`` can end.
        """
        self.calls.begin_step(meanwhile)
        self.end_expired()
        self._find_rotations()
        if self.requests or self.jobs.has_jobs:
            self._execute()
        if not self.requests:
            self.calls.post()
            self.device.kv_manager.run_idle_work()
        self._remove_windows()

    def end_search(self, search: BeamRequest, reason: FinishReason) -> None:
        """Forget a beam search that has ended."""
        self.profiler.record(search.sequences[0].record(reason))
        self.searches.pop(search.id, None)
        self.requests.pop(search.id, None)

    def end_all(self, reason: FinishReason, error: Exception | None = None) -> None:
        """End every admitted request, in any state that an exception left."""
        states = self.device.kv_manager.clear()
        for search in tuple(self.searches.values()):
            search.give_up(self.feeds, reason, error)
        self.searches.clear()
        for state in states:
            self.serving.report(state, reason, error)
        for request in self.requests.values():  # after an exception in the middle of ending one
            request.finish_from(0, reason, error)
        self.requests.clear()
        self.feeds.end_held(reason, error)

    def drop_all(self, error: Exception) -> None:
        """End every request and forget all slots, after ``end_all`` has failed itself: no reader may wait forever."""
        for request in tuple(self.requests.values()):
            with suppress(Exception):
                request.finish_from(0, FinishReason.ERROR, error)
        self.requests.clear()
        self.feeds.drop(error)
        self.device.runner.cache.reset()
        self.searches.clear()
        self.serving.install(self.device.runner, self.device.options)

    def refuse(self, request: RequestState, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request that was not admitted."""
        self.profiler.record(request.sequences[0].record(reason))
        request.finish_from(0, reason, error)

    def close(self) -> None:
        """Close the sources of jobs, end the thread of a user's policy, and drop the programs. No request may be left."""
        for part in (self.jobs, self.planner, self.device.draft_planner, self.device.runner):
            part.close()

    def end_expired(self) -> None:
        """End requests that were cancelled or are past their deadline."""
        now = self.clock()
        for search in tuple(self.searches.values()):
            if (reason := search.sequences[0].finish_reason_at(now)) is not None:
                search.end(reason)
        for state in list(self.device.kv_manager.states.values()):
            if (reason := state.finish_reason_at(now)) is not None:
                self.serving.end(state, reason)

    def _find_rotations(self) -> None:
        """Find how keys are moved before a request runs that may need it: later, the calls would overwrite a step's logits.

        If they fail, only these requests end.
        """
        states = [state for state in self._shifting if state.id in self.device.kv_manager.states]
        self._shifting.clear()
        try:
            _ = self.device.runner.rotations if states else None
        except Exception as error:
            for state in states:
                self.serving.end(state, FinishReason.ERROR, as_ours(error))

    def _execute(self) -> None:
        """Plan, run and choose. The call is recorded, and tokens are posted, while the next call runs, if there is one.

        First and last tokens are posted before it.
        """
        begin = self.clock()
        self.wait_until = None
        try:
            plan = self._plan()
        except NoPlanError as error:
            self._end_unrunnable(self.device.kv_manager.states[error.request])
            return
        if plan is None:
            return
        if plan.job is not None:
            self.calls.run_job(plan.job)
            return
        if plan.wait_until is not None:
            self.calls.post()
            self.wait_until = plan.wait_until
            return
        batch = self._prepare(plan)
        if batch is None:
            return
        planning = self.clock() - begin - batch.draft_seconds
        self.calls.run(batch, planning)

    def _prepare(self, plan: Plan) -> Batch | None:
        """Build the planned batch. None if its first request cannot run at all; it is ended."""
        batch = self.device.batches.prepare(plan)
        self.serving.preempted += batch.preempted
        if isinstance(batch, Batch):
            return batch
        self._end_unrunnable(batch.state)
        return None

    def _end_unrunnable(self, state: SequenceState) -> None:
        reason = DeviceError(
            f"no program or not enough slots for this request of {len(state.tokens)} tokens: load with more "
            "KV_SLOTS, or with larger PREFILL_ROWS or GENERATE_KV_LENS"
        )
        self.serving.end(state, FinishReason.ERROR, reason)

    def _plan(self) -> Plan | None:
        """Return the next plan; None if there is nothing to do.

        Raises:
            NoPlanError: a request cannot run at all.
        """
        is_alone = not self.jobs.has_jobs and not len(self.device.kv_manager.idle)
        if is_alone:
            index = self.device.runner.index
            high_slot = self.device.runner.cache.num_past
            plan = self.planner.repeated(
                self.device.table, self.device.kv_manager.free_slots, index.max_decoding(high_slot)
            )
            if plan is not None:
                return plan
        if is_alone:  # else a job may run first, or a policy wait for clients, and longer prefixes may come meanwhile
            self.device.kv_manager.allocate_alone()
        view = self.serving.view()
        return self.planner.plan(view) if view.requests or view.jobs else None

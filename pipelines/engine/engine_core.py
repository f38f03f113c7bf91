"""Serves requests on one device, one step at a time: plan, run, choose. It has no thread and no lock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from staticllm.core import Clock, FinishReason
from staticllm.errors import DeviceError, PromptError, as_ours
from staticllm.kvcache.stored import StoredSequence
from staticllm.pipelines.engine.batch import Batch, BatchEntry, CallContext, CallTimes, call_context, step_record
from staticllm.pipelines.engine.beams import BeamRequest
from staticllm.pipelines.engine.client_sequences.feeds import Feeds
from staticllm.pipelines.engine.device_state import device_state
from staticllm.pipelines.engine.device_use import Demand, Rows, demand_of, rows_of
from staticllm.pipelines.engine.inserted_steps import AbandonedCallError, InsertedSteps
from staticllm.pipelines.engine.jobs import JobSources
from staticllm.pipelines.engine.options import EngineOptions
from staticllm.pipelines.engine.sequence import ActiveRequest, Outcome, SequenceState
from staticllm.pipelines.engine.speculation.draft_check import DraftCheck
from staticllm.pipelines.engine.state import AnswerState, RequestState
from staticllm.pipelines.generation.sampler import Choice
from staticllm.pipelines.grammars.matcher import GrammarLimitError
from staticllm.pipelines.profiling.records import HostTimes, JobRecord, StepRecord
from staticllm.pipelines.profiling.stats import Profiler
from staticllm.pipelines.programs.model_runner import Logits, ModelRunner, SegmentResult, StepResult, not_finite
from staticllm.pipelines.scheduling.interface import Device, Plan, Policy, RequestStatus, View
from staticllm.pipelines.scheduling.planner import NoPlanError, Planner


class EngineCore:
    """The requests of one device and the steps that serve them. One thread at a time; in an ``Engine`` the engine's thread.

    ``requests`` holds the requests that were admitted and have not ended, by id, ``searches`` those that are beam searches, and
    ``jobs`` the calls of other models.
    ``wait_until`` is the moment until which the next step may wait; None if it should follow at once. All moments are those of
    ``clock``, which is also that of its requests and of the runner.
    """

    def __init__(
        self, runner: ModelRunner, policy: Policy, options: EngineOptions, clock: Clock = time.perf_counter
    ) -> None:
        self.clock = clock
        self.profiler = Profiler()
        self.requests: dict[int, ActiveRequest] = {}
        self.jobs = JobSources()
        self.wait_until: float | None = None
        self.device = device_state(runner, options, clock)
        self._last_job: list[Rows] = []  # of the last step, for the client that pays for it
        self._last_batches: list[Batch] = []  # of the last step: the inserted ones first
        self.planner = Planner(policy, options.waits_for_batch)
        self._unposted: list[SequenceState] = []  # the last call chose tokens for them that are not posted yet
        self._unrecorded: list[Callable[[], StepRecord]] = []  # make the records of calls that have ended
        self._preempted: list[int] = []  # since the last call
        self._shifting: list[AnswerState] = []  # since the last call, the model must show how keys are moved for them
        self.feeds = Feeds(self)
        self._inserted = InsertedSteps(self)
        self.searches: dict[int, BeamRequest] = {}
        self._for_others: Callable[[], None] | None = None  # called once the device has begun the call of this step
        self._leaving: set[int] = set()  # sources of cross-attention that are removed once no request sees them

    def install(self, runner: ModelRunner, options: EngineOptions) -> None:
        """Install a runner, with an empty request table and an empty KV cache. No request may be left."""
        assert not self.requests
        self.device = self.device.replaced(runner, options, self.clock)

    @property
    def vocab_size(self) -> int:
        """The number of token ids of the model."""
        return self.device.runner.cache.layout.vocab_size

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
        """The rows of the last step's call and of those between its blocks, by client; a job has one, if a client pays for it."""
        return self._last_job or rows_of(self._last_batches, self.device.runner.cache.slot_bytes)

    def last_token_times(self) -> list[float]:
        """Return the moment of the last token of each running request, and of each client sequence that is expected back."""
        running = (info.last_token_time for info in self.device.table if info.status is RequestStatus.RUNNING)
        expected = self.device.kv_manager.idle.expected_since(self.clock())
        return [*expected, *(moment for moment in running if moment is not None)]

    @property
    def is_offloading(self) -> bool:
        """Whether cached slots are on their way to the host pool; ``step`` moves them even without requests."""
        return self.device.kv_manager.prefix.is_offloading

    @property
    def has_unknown_costs(self) -> bool:
        """Whether ``measure_next`` has something to measure."""
        return self.device.options.measure_costs and not self.device.runner.probe.is_done

    def measure_next(self, is_needed: Callable[[], bool]) -> None:
        """Measure the cost of one more variant, without a request; no further call begins once ``is_needed`` is true."""
        self.device.runner.probe.measure_next(is_needed)

    def admit(self, request: RequestState) -> None:
        """Add a request; ``step`` serves it from now on. One without the source that the model needs ends with an error."""
        bank = self.device.runner.cache.cross
        source = request.request.source
        if bank.num_sources and (source not in bank or source in self._leaving):
            self.refuse(
                request, FinishReason.ERROR, PromptError("the request has no source, or its source was removed")
            )
            return
        self.requests[request.id] = request
        request.admit(self)
        if request.request.overflow == "context_shift":
            self._shifting.append(request.sequences[0])

    def remove_source(self, source: int) -> None:
        """Remove a source from the bank of cross-attention, once no request sees it; new requests about it are refused."""
        self._leaving.add(source)
        self._remove_sources()

    def _remove_sources(self) -> None:
        if not self._leaving:
            return
        active = (each.request.source for each in self.requests.values() if isinstance(each, RequestState))
        for source in self._leaving.difference(active):
            self.device.runner.cache.cross.remove(source)
            self._leaving.remove(source)

    def admit_swapped(self, request: RequestState, stored: StoredSequence) -> None:
        """Add a request of one answer that another device has served up to now, as ``KVCacheManager.add_swapped``."""
        self.requests[request.id] = request
        self.device.kv_manager.add_swapped(request.sequences[0], stored)

    def step(self, meanwhile: Callable[[], None] | None = None) -> None:
        """End requests that were cancelled or are past their deadline, then run one device call if requests or jobs are left.

        ``meanwhile`` is called once the device has begun. Any exception leaves requests that only ``end_all`` can end.
        """
        self._last_batches = []
        self._last_job = []
        self._for_others = meanwhile
        self.end_expired()
        self._find_rotations()
        if self.requests or self.jobs.has_jobs:
            self._execute()
        if not self.requests:
            self.post()
            self.device.kv_manager.run_idle_work()
        self._remove_sources()

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
            self._report(state, reason, error)
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
        self.install(self.device.runner, self.device.options)

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
                self._end(state, reason)

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
                self._end(state, FinishReason.ERROR, as_ours(error))

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
            self._run_job(plan.job)
            return
        if plan.wait_until is not None:
            self.post()
            self.wait_until = plan.wait_until
            return
        batch = self._prepare(plan)
        if batch is None:
            return
        planning = self.clock() - begin - batch.draft_seconds
        result = self._run(batch)
        if result is not None:
            self._take_results(batch, result, planning)
            self._hand_over_first()

    def _hand_over_first(self) -> None:
        """Post the first tokens of answers before the next call: while it runs, the device's threads keep readers from the cores.

        Other tokens, and the record of the call, wait for it: the device is idle until then.
        """
        first = [state for state in self._unposted if state.answer is not None and state.num_generated == 1]
        for state in first:
            state.post()
        if first:
            time.sleep(0)  # lets a reader take the interpreter's lock

    def run_inserted(self, batch: Batch) -> None:
        """Run a decode step between two blocks of the call in flight, and post its tokens at once: the next call is far away."""
        result = self._run(batch, is_inserted=True)
        if result is not None:
            self._take_results(batch, result, 0.0, is_inserted=True)
        self.post()

    def _take_results(self, batch: Batch, result: StepResult, planning: float, is_inserted: bool = False) -> None:
        """Choose tokens after a call, which took ``planning`` seconds to plan, and record it."""
        context = self._count_call(batch, result.device_seconds, is_inserted)
        chosen = self.clock()
        for entry, segment in zip(batch.entries, result.segments, strict=True):
            self._take_result(entry, segment, result)
        host = HostTimes(planning, result.prepare_seconds, result.commit_seconds, self.clock() - chosen)
        self.device.batches.observe(batch, host, result.device_seconds)
        self._unposted += [entry.state for entry in batch.entries]
        times = CallTimes(result.start, result.device_seconds, result.paused_seconds, result.num_inserted, is_inserted)
        self._unrecorded.append(partial(step_record, batch, times, context, host))

    def _prepare(self, plan: Plan) -> Batch | None:
        """Build the planned batch. None if its first request cannot run at all; it is ended."""
        batch = self.device.batches.prepare(plan)
        self._preempted += batch.preempted
        if isinstance(batch, Batch):
            return batch
        self._end_unrunnable(batch.state)
        return None

    def _end_unrunnable(self, state: SequenceState) -> None:
        reason = DeviceError(
            f"no program or not enough slots for this request of {len(state.tokens)} tokens: load with more "
            "KV_SLOTS, or with larger PREFILL_ROWS or GENERATE_KV_LENS"
        )
        self._end(state, FinishReason.ERROR, reason)

    def _run_job(self, job: int) -> None:
        """Run a call of another model. Tokens that are not posted yet are posted while it runs."""
        start = self.clock()
        owner = self.jobs.owner_of(job)
        num_parts = self.jobs.run(job, lambda: self._meanwhile(is_decoding=bool(self.requests)))
        self.post()
        if num_parts:
            self._last_job = [Rows(owner, "call", 1, 0)] if owner else []
            self.profiler.record(JobRecord(start, self.clock() - start, job, num_parts))

    def _plan(self) -> Plan | None:
        """Return the next plan; None if there is nothing to do.

        Raises:
            NoPlanError: a request cannot run at all.
        """
        is_alone = not self.jobs.has_jobs and not len(self.device.kv_manager.idle)
        if is_alone:
            index = self.device.runner.index
            high_slot = self.device.runner.cache.slots.high_slot
            plan = self.planner.repeated(
                self.device.table, self.device.kv_manager.free_slots, index.max_decoding(high_slot)
            )
            if plan is not None:
                return plan
        if is_alone:  # else a job may run first, or a policy wait for clients, and longer prefixes may come meanwhile
            self.device.kv_manager.allocate_alone()
        view = self.view()
        return self.planner.plan(view) if view.requests or view.jobs else None

    def view(self) -> View:
        """Return the engine's state as a policy receives it."""
        runner = self.device.runner
        manager = self.device.kv_manager
        manager.count_own_slots()
        high_slot = runner.cache.slots.high_slot
        leaving_slots = manager.prefix.leaving_slots
        device = Device(
            runner.index, runner.costs, high_slot, runner.is_complete, manager.swap_seconds, leaving_slots, runner.num_blocks,
            runner.costs.overrun,
        )  # fmt: skip
        view = self.device.table.view(self.clock(), manager.free_slots, manager.host_pool.free_slots, device)
        jobs = self.jobs.views(self.planner.longest_job(view)) if self.jobs.has_jobs else ()
        return replace(view, jobs=jobs, idle=manager.idle.views) if jobs or len(manager.idle) else view

    def _run(self, batch: Batch, is_inserted: bool = False) -> StepResult | None:
        """Run the call. If it fails, end its requests but no others, and return None."""
        start = self.clock()
        for entry in batch.entries:
            entry.state.started = entry.state.started or start
        segments = [entry.segment for entry in batch.entries]
        meanwhile = partial(self._meanwhile, batch.is_decoding, batch.entries)
        runner = self.device.runner
        try:
            if is_inserted:
                result = runner.insert(batch.variant, segments, meanwhile)
            else:
                between = self._inserted.between(batch) if runner.num_blocks > 1 else None
                result = runner.run(batch.variant, segments, meanwhile, batch.accept, between)
        except Exception as error:
            if self._inserted.has_failed and not is_inserted:
                raise  # a bug of ours between two blocks, not an error of this call
            times = CallTimes(start, self.clock() - start, is_inserted=is_inserted)
            context = self._count_call(batch, times.seconds, is_inserted)
            self._unrecorded.append(partial(step_record, batch, times, context))
            if isinstance(error, AbandonedCallError):
                return None
            if self.device.runner.cache.is_void:
                self._preempted += self.device.kv_manager.discard_slots()
            for entry in batch.entries:
                self._end(entry.state, FinishReason.ERROR, as_ours(error), is_trusted=False)
            return None
        for entry, segment in zip(batch.entries, result.segments, strict=True):
            if segment.stored is not None:
                self.device.kv_manager.put_in_host_pool(entry.state, segment.stored)
        return result

    def _meanwhile(self, is_decoding: bool, entries: Sequence[BatchEntry] = ()) -> None:
        """Work while the device runs: post tokens, prepare the next choices, and offload, in chunks while requests decode."""
        self.post()
        if self._for_others is not None:
            self._for_others()
            self._for_others = None
        for entry in entries:
            entry.state.prepare()
        if is_decoding:
            self.device.kv_manager.prefix.advance()
        else:
            self.device.kv_manager.prefix.finish_offloading()

    def post(self) -> None:
        """Hand the chosen tokens to their readers, and the last call to the profiler."""
        for record in self._unrecorded:
            self.profiler.record(record())
        for state in self._unposted:
            state.post()
        self._unrecorded.clear()
        self._unposted.clear()

    def _take_result(self, entry: BatchEntry, result: SegmentResult, step: StepResult) -> None:
        """Count the tokens that a call computed for an answer, and choose its next token if all have run."""
        state = entry.state
        if result.argmax is None and (len(step.segments) > 1 or entry.check is not None):
            self.device.quarantine.add(state.id)  # another request or the draft may be the cause; it runs again
            return
        if entry.check is not None:
            self._take_checked(entry.check)
            return
        self.device.quarantine.discard(state.id)
        outcome = state.take_result(result, len(entry.segment.tokens))
        if outcome is Outcome.CHOOSE and state.answer is not None:
            self._choose_first_or_next(state.answer, result.logits[-1], result.argmax)
        elif outcome is Outcome.RETURN:
            self.feeds.complete(state.id)
        elif outcome is Outcome.FAIL:
            self._end(state, FinishReason.ERROR, not_finite(step.variant), is_trusted=False)

    def _take_checked(self, check: DraftCheck) -> None:
        """Add the tokens that were chosen when a draft was checked, one by one as if each had had a call of its own."""
        state = check.state
        state.count_draft(check.draft, check.num_accepted)
        for choice in check.choices:
            state.info.add_computed(1)
            self._add_token(state, choice)
        if check.error is not None:
            self._fail(state, check.error)

    def _choose_first_or_next(self, state: AnswerState, logits: Logits, argmax: int | None) -> None:
        """Choose the next token; after a prompt, choose one for each of its answers."""
        if state.num_generated:
            self._choose(state, logits, argmax)
            return
        siblings: Sequence[AnswerState] = ()
        if state.kv.sequence is not None:
            self.device.kv_manager.prefix.keep_prompt(state.kv.sequence)
            siblings = self.requests[state.request_id].fork()
            for sibling in siblings:
                self.device.kv_manager.fork(state, sibling)
        self._unposted += siblings
        for each in (state, *siblings):
            self._choose(each, logits, argmax)

    def _choose(self, state: AnswerState, logits: Logits, argmax: int | None) -> None:
        try:
            choice = state.sample(logits, argmax)
        except Exception as error:  # the sampling of this request failed; the others continue
            self._fail(state, error)
            return
        self._add_token(state, choice)

    def _fail(self, state: AnswerState, error: Exception) -> None:
        """End an answer for which no token could be chosen. It is cut off where its grammar became too complex."""
        if isinstance(error, GrammarLimitError) and state.num_generated:
            self._end(state, FinishReason.LENGTH)
        else:
            self._end(state, FinishReason.ERROR, error)

    def _add_token(self, state: AnswerState, choice: Choice) -> None:
        if (reason := state.add(choice)) is not None:
            self._end(state, reason)
            return
        self.device.table.add_token(state.id, self.clock())
        limit = self.device.options.max_seq_len
        if len(state.tokens) > limit and not self.device.kv_manager.shorten(state, limit // 2):
            self._end(state, FinishReason.LENGTH)
        elif self.device.kv_manager.recompute_outgrown(state):
            self._preempted.append(state.id)
        elif state.info.status is RequestStatus.SWAPPED:
            self.device.kv_manager.offload(state)

    def _end(
        self, state: SequenceState, reason: FinishReason, error: Exception | None = None, is_trusted: bool = True
    ) -> None:
        """End an answer; its slots are kept for their prefix if they can be trusted."""
        if is_trusted:
            self.device.kv_manager.free(state)
        else:
            self.device.kv_manager.discard(state)
        self.device.quarantine.discard(state.id)
        self._report(state, reason, error)

    def _report(self, state: SequenceState, reason: FinishReason, error: Exception | None = None) -> None:
        if state.is_recorded:
            self.profiler.record(state.record(reason))
        if state.answer is not None and state.answer.drafts is not None:
            self.device.draft_planner.forget(state.id)
        if self.requests[state.request_id].finish(state, reason, error):
            del self.requests[state.request_id]

    def _count_call(self, batch: Batch, seconds: float, is_inserted: bool = False) -> CallContext:
        """Add a call to the times of its requests, and return what else was in the engine."""
        seconds_per_row = seconds / sum(len(entry.segment.tokens) for entry in batch.entries)
        for entry in batch.entries:
            entry.state.add_call(seconds, seconds_per_row * len(entry.segment.tokens))
        self._last_batches.append(batch)
        if self.device.runner.num_blocks > 1:
            self._inserted.count(batch, seconds)
        preempted = [] if is_inserted else self._preempted  # those were preempted for the call in flight
        context = call_context(self.device.table, self.device.runner.cache.slots.num_used, preempted)
        preempted.clear()
        return context

"""Runs the calls of an engine core: begins them, works meanwhile, counts and records them, and hands over what was chosen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from staticllm.core import FinishReason
from staticllm.errors import as_ours

from ..profiling.records import HostTimes, JobRecord, StepRecord
from ..programs.model_runner import StepResult
from .batch import Batch, BatchEntry, CallContext, CallTimes, call_context, step_record
from .chooser import Chooser
from .device_use import Rows, rows_of
from .inserted_steps import AbandonedCallError, InsertedStepError, InsertedSteps
from .serving import Serving


class CallRunner:
    """Runs device calls for the requests that ``serving`` has. Runs on the engine's thread."""

    def __init__(self, serving: Serving, chooser: Chooser) -> None:
        self._serving = serving
        self._chooser = chooser
        self.inserted = InsertedSteps(serving)
        self._last_job: list[Rows] = []  # of the last step, for the client that pays for it
        self._last_batches: list[Batch] = []  # of the last step: the inserted ones first
        self._unrecorded: list[Callable[[], StepRecord]] = []  # make the records of calls that have ended
        self._for_others: Callable[[], None] | None = None  # called once the device has begun the call of this step

    def begin_step(self, meanwhile: Callable[[], None] | None) -> None:
        """Forget the calls of the last step. ``meanwhile`` is called once the device has begun the call of this one."""
        self._last_batches = []
        self._last_job = []
        self._for_others = meanwhile

    @property
    def rows(self) -> list[Rows]:
        """The rows of the last step's call and of those between its blocks, by client; jobs count if a client pays."""
        return self._last_job or rows_of(self._last_batches, self._serving.device.runner.cache.slot_bytes)

    def run(self, batch: Batch, planning: float) -> None:
        """Run a call that took ``planning`` seconds to plan, choose the tokens that follow, and post first tokens at once."""
        result = self._run(batch)
        if result is not None:
            self._take_results(batch, result, planning)
            if self._serving.outbox.post_first():
                time.sleep(0)  # lets a reader take the interpreter's lock

    def run_inserted(self, batch: Batch) -> None:
        """Run a decode step between two blocks of the call in flight, and post its tokens at once: the next call is far away."""
        result = self._run(batch, is_inserted=True)
        if result is not None:
            self._take_results(batch, result, 0.0, is_inserted=True)
        self.post()

    def _take_results(self, batch: Batch, result: StepResult, planning: float, is_inserted: bool = False) -> None:
        """Choose tokens after a call, which took ``planning`` seconds to plan, and record it."""
        context = self.count_call(batch, result.device_seconds, is_inserted)
        chosen = self._serving.clock()
        for entry, segment in zip(batch.entries, result.segments, strict=True):
            self._chooser.take(entry, segment, result)
        host = HostTimes(planning, result.prepare_seconds, result.commit_seconds, self._serving.clock() - chosen)
        self._serving.device.batches.observe(batch, host, result.device_seconds)
        self._serving.outbox.add(entry.state for entry in batch.entries)
        times = CallTimes(result.start, result.device_seconds, result.paused_seconds, result.num_inserted, is_inserted)
        self._unrecorded.append(partial(step_record, batch, times, context, host))

    def run_job(self, job: int) -> None:
        """Run a call of another model. Tokens that are not posted yet are posted while it runs."""
        start = self._serving.clock()
        owner = self._serving.jobs.owner_of(job)
        num_parts = self._serving.jobs.run(job, lambda: self._meanwhile(is_decoding=bool(self._serving.requests)))
        self.post()
        if num_parts:
            self._last_job = [Rows(owner, "call", 1, 0)] if owner else []
            self._serving.profiler.record(JobRecord(start, self._serving.clock() - start, job, num_parts))

    def _run(self, batch: Batch, is_inserted: bool = False) -> StepResult | None:
        """Run the call. If it fails, end its requests but no others, and return None."""
        start = self._serving.clock()
        for entry in batch.entries:
            entry.state.started = entry.state.started or start
        segments = [entry.segment for entry in batch.entries]
        meanwhile = partial(self._meanwhile, batch.is_decoding, batch.entries)
        runner = self._serving.device.runner
        try:
            if is_inserted:
                result = runner.insert(batch.variant, segments, meanwhile)
            else:
                between = self.inserted.between(batch, self.run_inserted) if runner.num_blocks > 1 else None
                result = runner.run(batch.variant, segments, meanwhile, batch.accept, between)
        except InsertedStepError as failed:
            failed.reraise()
        except Exception as error:
            times = CallTimes(start, self._serving.clock() - start, is_inserted=is_inserted)
            context = self.count_call(batch, times.seconds, is_inserted)
            self._unrecorded.append(partial(step_record, batch, times, context))
            if isinstance(error, AbandonedCallError):
                return None
            if self._serving.device.runner.cache.is_void:
                self._serving.preempted += self._serving.device.kv_manager.discard_slots()
            for entry in batch.entries:
                self._serving.end(entry.state, FinishReason.ERROR, as_ours(error), is_trusted=False)
            return None
        for entry, segment in zip(batch.entries, result.segments, strict=True):
            if segment.stored is not None:
                self._serving.device.kv_manager.put_in_host_pool(entry.state, segment.stored)
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
            self._serving.device.kv_manager.prefix.advance()
        else:
            self._serving.device.kv_manager.prefix.finish_offloading()

    def post(self) -> None:
        """Hand the chosen tokens to their readers, and the last call to the profiler."""
        for record in self._unrecorded:
            self._serving.profiler.record(record())
        self._unrecorded.clear()
        self._serving.outbox.post()

    def count_call(self, batch: Batch, seconds: float, is_inserted: bool = False) -> CallContext:
        """Add a call to the times of its requests, and return what else was in the engine."""
        seconds_per_row = seconds / sum(len(entry.segment.tokens) for entry in batch.entries)
        for entry in batch.entries:
            entry.state.add_call(seconds, seconds_per_row * len(entry.segment.tokens))
        self._last_batches.append(batch)
        if self._serving.device.runner.num_blocks > 1:
            self.inserted.count(batch, seconds)
        preempted = [] if is_inserted else self._serving.take_preempted()  # else they are those of the call in flight
        return call_context(self._serving.device.table, self._serving.device.runner.cache.slots.num_used, preempted)

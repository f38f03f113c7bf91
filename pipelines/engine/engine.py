"""The engine serves many requests on one device with one thread."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from staticllm.core import FinishReason
from staticllm.errors import BusyError, ClosedError, DeviceError, as_ours
from staticllm.pipelines.engine.batch import Batch, BatchBuilder
from staticllm.pipelines.engine.callbacks import Callbacks
from staticllm.pipelines.engine.kv_manager import KVCacheManager, make_kv_manager
from staticllm.pipelines.engine.options import EngineOptions
from staticllm.pipelines.engine.output_queue import OutputQueue
from staticllm.pipelines.engine.quarantine import Quarantine
from staticllm.pipelines.engine.recording import CallContext, call_context, request_record, step_record
from staticllm.pipelines.engine.request import EngineRequest, RequestState, SequenceState
from staticllm.pipelines.profiling.records import HostTimes, StepRecord
from staticllm.pipelines.profiling.stats import Profiler
from staticllm.pipelines.programs.model_runner import Logits, ModelRunner, StepResult, not_finite
from staticllm.pipelines.scheduling.interface import Device, Plan, Policy, RequestStatus
from staticllm.pipelines.scheduling.planner import NoPlanError, Planner
from staticllm.pipelines.scheduling.request_table import RequestTable
from staticllm.threads import check_process, start_thread

Result = TypeVar("Result")


@dataclass(frozen=True)
class Switch:
    """A runner that replaces the current one when no request is left."""

    runner: ModelRunner
    options: EngineOptions
    on_switch: Callable[[], None]


class Engine:
    """Serves requests on one device: the ``EngineClient`` of this process.

    Any thread may call ``submit``, ``cancel``, ``switch``, ``run_between_steps`` and ``close``. Everything else runs on the
    engine's thread, which starts with the first request. Each step plans, runs and chooses tokens; the readers receive the
    chosen tokens while the next call runs.
    """

    def __init__(self, runner: ModelRunner, policy: Policy, options: EngineOptions) -> None:
        self.profiler = Profiler()
        self._planner = Planner(policy)
        self._next: Switch | None = None
        self.pid = os.getpid()
        self._install_runner(runner, options)
        self._live: dict[int, RequestState] = {}
        self._inbox: deque[RequestState] = deque()
        self._callbacks = Callbacks()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._unposted: list[SequenceState] = []  # the last call chose tokens for them that are not posted yet
        self._unrecorded: list[StepRecord] = []
        self._preempted: list[int] = []  # since the last call
        self._num_waiting = 0  # waiting requests in the table
        self._is_closing = self._is_draining = False

    def _install_runner(self, runner: ModelRunner, options: EngineOptions) -> None:
        """Install a runner, with an empty request table and an empty KV cache."""
        self._runner, self._options = runner, options
        self._table = RequestTable(options.limits)
        self._kv_manager = make_kv_manager(runner.cache, self._table, options)
        self._batches = BatchBuilder(runner, self._table, self._kv_manager)
        self._quarantine = Quarantine()

    def submit(self, request: EngineRequest, queue: OutputQueue | None = None) -> OutputQueue:
        """Submit a request. Its outputs arrive in ``queue``, which is returned; None creates a new one.

        Raises:
            BusyError: ``MAX_WAITING`` requests are waiting.
            ClosedError: the engine was closed, or belongs to another process.
        """
        state = RequestState(request, self._runner.cache.layout.vocab_size, queue)
        self.submit_state(state)
        return state.queue

    def submit_state(self, state: RequestState) -> None:
        """Submit like ``submit``, but with a state that a caller in this process can inspect.

        Raises:
            BusyError, ClosedError: as for ``submit``.
        """
        self.check_process()
        with self._wake:
            num_waiting = len(self._inbox) + self._num_waiting
            if num_waiting >= self._options.max_waiting:
                raise BusyError(
                    f"{num_waiting} requests wait, MAX_WAITING is {self._options.max_waiting}: try again later, "
                    "or load with a larger MAX_WAITING"
                )
            self._start()
            self.enqueue([state])

    def cancel(self, request: int, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request, or one of its answers, before the next device call. Unknown and ended requests are ignored."""
        state = self._live.get(request)
        if state is not None:
            state.cancel(index, reason)

    def enqueue(self, states: Iterable[RequestState]) -> None:
        """Add requests without starting the thread; the caller serves them with ``step``."""
        for state in states:
            self._live[state.request.id] = state
            self._inbox.append(state)

    def check_process(self) -> None:
        """Check that this is the process that the engine belongs to.

        Raises:
            ClosedError: it is a forked child.
        """
        check_process(self.pid)

    def switch(self, runner: ModelRunner, options: EngineOptions, on_switch: Callable[[], None] = lambda: None) -> None:
        """Change to another runner when all admitted requests have ended; new requests wait for it.

        ``on_switch`` is called on the engine's thread after the change.

        Raises:
            ClosedError: the engine was closed.
        """
        self.check_process()
        with self._wake:
            self._start()
            self._next = Switch(runner, options, on_switch)

    def run_between_steps(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` on the engine's thread between two device calls, and return what it returns.

        Raises:
            ClosedError: the engine was closed.
            Exception: ``function`` raised it.
        """
        self.check_process()
        with self._wake:
            self._start()
            future = self._callbacks.add(function)
        return future.result()

    def close(self, drain: bool = False) -> None:
        """End the thread: with ``drain`` after all requests have ended, else at once, and cancel them.

        A second call does nothing, and neither does a call in a forked child: the thread and the lock belong to the parent.
        """
        if os.getpid() != self.pid:
            return
        with self._wake:
            self._is_closing = True
            self._is_draining = drain and self._thread is not None
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._planner.close()

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no requests."""
        return not self._inbox and not len(self._table)

    @property
    def runner(self) -> ModelRunner:
        """The current runner; to be used only inside ``run_between_steps``."""
        return self._runner

    @property
    def kv_manager(self) -> KVCacheManager:
        """The current KV cache manager; to be used only inside ``run_between_steps``."""
        return self._kv_manager

    def _start(self) -> None:
        """Start the thread if necessary, and wake it. The caller holds the lock."""
        if self._is_closing:
            raise ClosedError("the pipeline is closed: load the model again")
        if self._thread is None:
            self._thread = start_thread(self._loop, "staticllm-engine")
        self._wake.notify()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._callbacks or self._next or len(self._table) or self._is_closing):
                    if self._kv_manager.prefix.is_offloading:
                        break
                    self._wake.wait()
                if self._is_closing and not (self._is_draining and (self._inbox or len(self._table))):
                    break
            self.step()
        with self._wake:  # nothing is added after this: the engine is closing
            left, self._next = [state.sequences[0] for state in self._inbox], None
            self._inbox.clear()
        for sequence in left:
            self._report(sequence, FinishReason.CANCELLED)
        self._end_all(FinishReason.CANCELLED)
        self._callbacks.run()

    def step(self) -> None:
        """Admit and expire requests, run callbacks, and run one device call if there are requests."""
        try:
            self._admit()
            self._expire_requests()
            self._callbacks.run()
            if len(self._table):
                self._execute()
            if not len(self._table):
                self._post()
                self._kv_manager.run_idle_work()
        except BaseException as error:  # a bug of ours: every request must end, or its reader would wait for ever
            self._end_all(FinishReason.ERROR, as_ours(error))

    def _end_all(self, reason: FinishReason, error: Exception | None = None) -> None:
        """End every admitted request, in any state that an exception left."""
        for sequence in self._kv_manager.clear():
            self._report(sequence, reason, error)
        with self._wake:  # a request that is submitted meanwhile is not ended
            waiting = {state.request.id for state in self._inbox}
            left = [self._live.pop(number) for number in list(self._live) if number not in waiting]
        for state in left:
            state.finish_from(0, reason, error)

    def _execute(self) -> None:
        """Plan, run and choose. The chosen tokens are posted, and the call is recorded, while the next call runs."""
        begin = time.perf_counter()
        batch = self._prepare()
        if not batch.parts:
            return
        ready = time.perf_counter()
        result = self._run(batch)
        if result is None:
            return
        context = self._count_call(batch, result.device_seconds)
        chosen = time.perf_counter()
        self._choose_all(batch, result)
        host = HostTimes(ready - begin, result.prepare_seconds, result.commit_seconds, time.perf_counter() - chosen)
        self._unposted += [part.state for part in batch.parts]
        self._unrecorded.append(step_record(batch, result.variant, result.start, result.device_seconds, context, host))

    def _meanwhile(self, is_decoding: bool) -> None:
        """Work while the device runs: post tokens, and offload in chunks while requests decode, so that no stream stalls."""
        self._post()
        if is_decoding:
            self._kv_manager.prefix.advance()
        else:
            self._kv_manager.prefix.finish_offloading()

    def _post(self) -> None:
        """Hand the chosen tokens to their readers, and the last call to the profiler."""
        for record in self._unrecorded:
            self.profiler.record(record)
        for sequence in self._unposted:
            sequence.post()
        self._unrecorded.clear()
        self._unposted.clear()

    def _admit(self) -> None:
        with self._wake:
            if self._next and not len(self._table):
                switch, self._next = self._next, None
                self._install_runner(switch.runner, switch.options)
                switch.on_switch()
            while self._inbox and not self._next:
                self._kv_manager.add(self._inbox.popleft().sequences[0])
            self._num_waiting = self._table.count(RequestStatus.WAITING)

    def _expire_requests(self) -> None:
        """End the requests that were cancelled or have passed their deadline. Runs before each call."""
        now = time.perf_counter()
        for sequence in list(self._kv_manager.states.values()):
            if (reason := sequence.finish_reason_at(now)) is not None:
                self._end(sequence, reason)
        if self._next:  # new requests wait for the other runner, and may end before it is installed
            with self._wake:
                reasons = [(state, state.sequences[0].finish_reason_at(now)) for state in self._inbox]
                self._inbox = deque(state for state, reason in reasons if reason is None)
            for state, reason in reasons:
                if reason is not None:
                    self._report(state.sequences[0], reason)

    def _plan(self) -> Plan:
        runner, manager = self._runner, self._kv_manager
        device = Device(runner.index, runner.costs, runner.cache.slots.high_slot, runner.is_complete)
        return self._planner.plan(
            self._table.view(time.perf_counter(), manager.free_slots, manager.host_pool.free_slots, device)
        )

    def _prepare(self) -> Batch:
        """Plan and build the next batch. If a request cannot run at all, end it and return an empty batch."""
        try:
            batch = self._batches.prepare(self._plan(), self._quarantine)
        except NoPlanError as error:
            batch = Batch((), unrunnable=self._kv_manager.states[error.request])
        self._preempted += batch.preempted
        if batch.unrunnable is not None:
            reason = DeviceError(
                f"no program or not enough slots for this request of {len(batch.unrunnable.tokens)} tokens: load with more "
                "KV_SLOTS, or with larger PREFILL_ROWS or GENERATE_KV_LENS"
            )
            self._end(batch.unrunnable, FinishReason.ERROR, reason)
        return batch

    def _run(self, batch: Batch) -> StepResult | None:
        """Run the call. If it fails, end its requests but no others, and return None."""
        runner, segments, variant = self._runner, [part.segment for part in batch.parts], batch.variant
        if not self._kv_manager.prefix.is_offloading and runner.cache.compact():  # else slots become free soon
            variant = runner.variant_for(segments)
        assert variant is not None
        start = time.perf_counter()
        for part in batch.parts:
            part.state.started = part.state.started or start
        try:
            result = runner.run(variant, segments, lambda: self._meanwhile(batch.is_decoding))
        except Exception as error:
            seconds = time.perf_counter() - start
            self._unrecorded.append(step_record(batch, variant, start, seconds, self._count_call(batch, seconds)))
            if runner.cache.is_void:
                self._preempted += self._kv_manager.discard_slots()
            for part in batch.parts:
                self._end(part.state, FinishReason.ERROR, as_ours(error), is_trusted=False)
            return None
        for part, segment in zip(batch.parts, result.segments, strict=True):
            if segment.stored is not None:
                self._kv_manager.put_in_host_pool(part.state, segment.stored)
        return result

    def _choose_all(self, batch: Batch, result: StepResult) -> None:
        for part, segment in zip(batch.parts, result.segments, strict=True):
            sequence = part.state
            if segment.argmax is None and len(batch.parts) > 1:
                self._quarantine.add(sequence.id)  # another request may be the cause; it runs again
            elif segment.argmax is None:
                self._end(sequence, FinishReason.ERROR, not_finite(result.variant), is_trusted=False)
            else:
                self._quarantine.discard(sequence.id)
                if self._table.add_computed(sequence.id, len(part.segment.tokens)):
                    self._choose_first_or_next(sequence, segment.logits[-1], segment.argmax)

    def _choose_first_or_next(self, sequence: SequenceState, logits: Logits, argmax: int) -> None:
        """Choose the next token; after a prompt, choose one for each of its answers."""
        if sequence.num_generated:
            self._choose(sequence, logits, argmax)
            return
        siblings: list[SequenceState] = []
        if sequence.sequence is not None:
            self._kv_manager.prefix.keep_prompt(sequence.sequence)
            siblings = self._live[sequence.request.id].fork() if sequence.request.num_sequences > 1 else []
            for sibling in siblings:
                self._kv_manager.fork(sequence, sibling)
        self._unposted += siblings
        for each in (sequence, *siblings):
            self._choose(each, logits, argmax)

    def _choose(self, sequence: SequenceState, logits: Logits, argmax: int) -> None:
        try:
            reason = sequence.choose(logits, argmax)
        except Exception as error:  # the sampling of this request failed; the others continue
            self._end(sequence, FinishReason.ERROR, error)
            return
        if reason is not None:
            self._end(sequence, reason)
            return
        self._table.add_token(sequence.id, time.perf_counter())
        limit = self._options.max_seq_len
        if len(sequence.tokens) > limit and not self._kv_manager.shorten(sequence, limit // 2):
            self._end(sequence, FinishReason.LENGTH)
        elif self._table[sequence.id].status is RequestStatus.SWAPPED:
            self._kv_manager.offload(sequence)

    def _end(
        self, sequence: SequenceState, reason: FinishReason, error: Exception | None = None, is_trusted: bool = True
    ) -> None:
        """End an answer; its slots are kept for their prefix if they can be trusted."""
        if is_trusted:
            self._kv_manager.free(sequence)
        else:
            self._kv_manager.discard(sequence)
        self._quarantine.discard(sequence.id)
        self._report(sequence, reason, error)

    def _report(self, sequence: SequenceState, reason: FinishReason, error: Exception | None = None) -> None:
        self.profiler.record(request_record(sequence, reason))
        if self._live[sequence.request.id].finish(sequence, reason, error):
            del self._live[sequence.request.id]

    def _count_call(self, batch: Batch, seconds: float) -> CallContext:
        """Add a call to the times of its requests, and return what else was in the engine."""
        for part in batch.parts:
            part.state.add_call(seconds)
        context = call_context(self._table, self._runner.cache.slots.num_used, self._preempted)
        self._preempted.clear()
        return context

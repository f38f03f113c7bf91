"""The engine: one thread that owns the device and serves many requests. A step is: plan, run, choose; tell during the next."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from staticllm.core import FinishReason
from staticllm.errors import BusyError, ClosedError, DeviceError, as_ours
from staticllm.pipelines.engine.batch import BatchBuilder, Part
from staticllm.pipelines.engine.kv_manager import EngineOptions, KVCacheManager, make_kv_manager
from staticllm.pipelines.engine.quarantine import Quarantine
from staticllm.pipelines.engine.request import Request
from staticllm.pipelines.profiling.records import HostTimes, RequestRecord, StepRecord
from staticllm.pipelines.profiling.stats import Profiler
from staticllm.pipelines.programs.model_runner import Logits, ModelRunner, not_finite
from staticllm.pipelines.scheduling.interface import Device, Plan, Policy
from staticllm.pipelines.scheduling.planner import NoPlanError, Planner
from staticllm.pipelines.scheduling.request_table import RequestInfo, RequestTable
from staticllm.threads import check_process, start_thread

Result = TypeVar("Result")


@dataclass(frozen=True)
class Switch:
    """Another runner that takes over between two requests."""

    runner: ModelRunner
    options: EngineOptions
    on_switch: Callable[[], None]


class Engine:
    """Requests come in by ``submit`` from any thread, tokens go out by their output queues. The thread starts with the first."""

    def __init__(self, runner: ModelRunner, policy: Policy, options: EngineOptions) -> None:
        self.profiler = Profiler()
        self._planner = Planner(policy)
        self._next: Switch | None = None
        self._pid = os.getpid()
        self._install_runner(runner, options)
        self._inbox: deque[Request] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._step: StepRecord | None = None  # the last call
        self._unposted: list[Request | StepRecord] = []  # what that has left to be told
        self._num_waiting = 0  # of the requests in the request table
        self._is_closing = self._is_draining = False

    def _install_runner(self, runner: ModelRunner, options: EngineOptions) -> None:
        """Begin with a runner, and with nobody on it."""
        self._runner, self._options = runner, options
        self._variant = runner.index.variants[0]  # of the last call
        self._table = RequestTable(options.limits)
        self._kv_manager = make_kv_manager(runner.cache, self._table, options)
        self._batches = BatchBuilder(runner, self._table, self._kv_manager)
        self._quarantine = Quarantine()

    def switch(self, runner: ModelRunner, options: EngineOptions, on_switch: Callable[[], None] = lambda: None) -> None:
        """Go over to another runner when all requests that run now have ended; new requests wait for it.

        ``on_switch`` is called on the engine's thread in the moment of the change.

        Raises:
            ClosedError: the engine was closed.
        """
        self.check_process()
        with self._wake:
            self._start()
            self._next = Switch(runner, options, on_switch)

    def submit(self, request: Request) -> None:
        """Hand a request over.

        Raises:
            BusyError: as many wait as may.
            ClosedError: the engine was closed, or belongs to another process.
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
            self._inbox.append(request)

    def check_process(self) -> None:
        """
        Raises:
            ClosedError: this is a forked child of the process that the engine belongs to.
        """
        check_process(self._pid)

    def enqueue(self, requests: Iterable[Request]) -> None:
        """Hand requests over without starting the thread: whoever calls ``step`` serves them."""
        self._inbox.extend(requests)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits and nobody runs."""
        return not self._inbox and not len(self._table)

    def call(self, errand: Callable[[], Result]) -> Result:
        """Run something between two device calls, on the engine's thread, and return what it returns."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(errand())
            except BaseException as error:  # the caller's to handle, not the engine's
                future.set_exception(error)

        self.check_process()
        with self._wake:
            self._start()
            self._errands.append(run)
        result: Result = future.result()
        return result

    def close(self, drain: bool = False) -> None:
        """End the thread: after all requests have ended, or at once, cancelling them. Closing again does nothing.

        Nor does closing in a forked child: the thread, and perhaps the lock, are the parent's.
        """
        if os.getpid() != self._pid:
            return
        with self._wake:
            self._is_closing = True
            self._is_draining = drain and self._thread is not None
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._planner.close()

    @property
    def runner(self) -> ModelRunner:
        """What calls the device; only for errands."""
        return self._runner

    @property
    def kv_manager(self) -> KVCacheManager:
        """Whose rows lie where; only for errands."""
        return self._kv_manager

    def _start(self) -> None:
        """Let the thread look at what is about to be handed over; where this fails, nothing was. The caller holds the lock."""
        if self._is_closing:
            raise ClosedError("the pipeline is closed: load the model again")
        if self._thread is None:
            self._thread = start_thread(self._loop, "staticllm-engine")
        self._wake.notify()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._errands or self._next or len(self._table) or self._is_closing):
                    if self._kv_manager.prefix.is_offloading:
                        break
                    self._wake.wait()
                if self._is_closing and not (self._is_draining and (self._inbox or len(self._table))):
                    break
            self.step()
        with self._wake:  # nothing is added after this: the engine is closing
            left, self._next = [*self._inbox], None
            self._inbox.clear()
        for request in (*self._kv_manager.clear(), *left):
            self._report(request, FinishReason.CANCELLED)
        self._run_errands()

    def step(self) -> None:
        """One device call, and what goes before and after it."""
        try:
            self._admit()
            self._expire_requests()
            self._run_errands()
            if len(self._table):
                self._call()
            if not len(self._table):
                self._post()
                self._kv_manager.compact_when_idle()
        except BaseException as error:  # ours: no request may wait for ever for an engine that has stopped
            for request in self._kv_manager.clear():
                self._report(request, FinishReason.ERROR, as_ours(error))

    def _call(self) -> None:
        """Plan, run, choose. What is chosen is told, and recorded, while the next call runs."""
        begin = time.perf_counter()
        parts = self._prepared()
        if not parts:
            return
        ready = time.perf_counter()
        outputs = self._run(parts)
        done = time.perf_counter()
        self._choose_all(parts, outputs)
        runner, step = self._runner, self._step
        assert step is not None
        sampling = time.perf_counter() - done
        host = HostTimes(ready - begin, runner.prepare_seconds, runner.commit_seconds, sampling)
        self._unposted += [*(part.request for part in parts), step if step.has_failed else replace(step, host=host)]

    def _meanwhile(self, is_decoding: bool) -> None:
        """While the device runs. Who leaves the arena goes in pieces if somebody waits for the next token."""
        self._post()
        self._kv_manager.prefix.advance(is_hurried=not is_decoding)

    def _post(self) -> None:
        """Tokens to their readers, the last call to the records."""
        for item in self._unposted:
            if isinstance(item, StepRecord):
                self.profiler.record(item)
            else:
                item.post()
        self._unposted.clear()

    def _admit(self) -> None:
        with self._wake:
            if self._next and not len(self._table):
                switch, self._next = self._next, None
                self._install_runner(switch.runner, switch.options)
                switch.on_switch()
            while self._inbox and not self._next:
                request = self._inbox.popleft()
                self._kv_manager.requests[request.id] = request
                self._table.add(
                    RequestInfo(request.id, request.arrival, len(request.tokens), request.priority, request.deadline)
                )
            self._num_waiting = self._table.count("waiting")

    def _run_errands(self) -> None:
        while self._errands:
            self._errands.popleft()()

    def _expire_requests(self) -> None:
        """Between any two calls: who was cancelled, or is late, leaves."""
        now = time.perf_counter()
        for request in list(self._kv_manager.requests.values()):
            if (reason := request.finish_reason_at(now)) is not None:
                self._end(request, reason)
        if self._next:  # new requests wait for the other runner, and may leave before it comes
            with self._wake:
                reasons = [(request, request.finish_reason_at(now)) for request in self._inbox]
                self._inbox = deque(request for request, reason in reasons if reason is None)
            for request, reason in reasons:
                if reason is not None:
                    self._report(request, reason)

    def _plan(self) -> Plan:
        runner, kv_manager = self._runner, self._kv_manager
        device = Device(runner.index, runner.costs, runner.cache.slots.high_slot, runner.is_complete)
        return self._planner.plan(
            self._table.view(time.perf_counter(), kv_manager.free_slots, kv_manager.host_pool.free_slots, device)
        )

    def _prepared(self) -> list[Part]:
        """What goes into the next call; nothing where a request that cannot run at all has been ended instead."""
        try:
            return self._batches.prepare(self._plan(), self._quarantine)
        except NoPlanError as error:
            self._end(self._kv_manager.requests[error.request], FinishReason.ERROR, DeviceError(str(error)))
            return []

    def _run(self, parts: list[Part]) -> list[Logits]:
        """The call. A device that fails takes the requests of this call with it, and nobody else."""
        runner = self._runner
        if not self._kv_manager.prefix.is_offloading:  # else there will soon be more room
            runner.cache.compact()
        segments = [part.segment for part in parts]
        variant = runner.variant_for(segments)
        assert variant is not None
        self._variant = variant
        start = time.perf_counter()
        for part in parts:
            part.request.started = part.request.started or start
        try:
            is_decoding = any(not part.is_prefill for part in parts)
            outputs = runner.run(variant, segments, self._batches.aside(parts), lambda: self._meanwhile(is_decoding))
        except Exception as error:
            self._record(start, time.perf_counter() - start, parts, has_failed=True)
            if not runner.cache.is_settled:
                self._batches.preempted += self._kv_manager.discard_slots()
            for part in parts:
                self._end(part.request, FinishReason.ERROR, as_ours(error), is_kept=False)
            return []
        for index, stored in runner.set_aside.items():
            self._kv_manager.set_aside(parts[index].request, stored)
        self._record(runner.started, runner.seconds, parts)
        return outputs

    def _choose_all(self, parts: list[Part], outputs: list[Logits]) -> None:
        for part, logits, best in zip(parts, outputs, self._runner.best, strict=False):
            request, count = part.request, len(part.segment.tokens)
            if best is None and len(parts) > 1:  # perhaps another's fault: nothing was kept, so it can run again
                self._quarantine.add(request.id)
            elif best is None:
                self._end(request, FinishReason.ERROR, not_finite(self._variant), is_kept=False)
            else:
                self._quarantine.discard(request.id)
                if self._table.ran(request.id, count):
                    self._choose(request, logits, best)

    def _choose(self, request: Request, logits: Logits, best: int) -> None:
        if not request.num_generated and request.sequence is not None:
            self._kv_manager.prefix.keep_prompt(request.sequence)
        try:
            reason = request.choose(logits, best)
        except Exception as error:  # of this request's own sampling or text; the others go on
            self._end(request, FinishReason.ERROR, error)
            return
        if reason is not None:
            self._end(request, reason)
            return
        self._table.chose(request.id, time.perf_counter())
        if len(request.tokens) > self._options.max_seq_len and not self._kv_manager.shorten(
            request, self._options.max_seq_len // 2
        ):
            self._end(request, FinishReason.LENGTH)
        elif self._table[request.id].state == "swapped":
            self._kv_manager.swap_out(request)

    def _end(
        self, request: Request, reason: FinishReason, error: Exception | None = None, is_kept: bool = True
    ) -> None:
        self._kv_manager.end(request, is_kept)
        self._quarantine.discard(request.id)
        self._report(request, reason, error)

    def _report(self, request: Request, reason: FinishReason, error: Exception | None = None) -> None:
        self.profiler.record(
            RequestRecord(
                request.id, request.arrival, request.started, tuple(request.token_times),
                request.num_prompt, request.num_cached, reason, time.perf_counter(),
            )
        )  # fmt: skip
        request.end(reason, error)

    def _record(self, start: float, seconds: float, parts: list[Part], has_failed: bool = False) -> None:
        prompts = [part for part in parts if part.is_prefill]
        for part in parts:
            part.request.spent(seconds, part.is_prefill)
        swapped, waiting = self._table.ids("swapped"), set(self._table.ids("waiting"))
        self._step = StepRecord(
            start=start,
            seconds=seconds,
            variant=self._variant,
            decode=tuple(part.request.id for part in parts if not part.is_prefill),
            prefill=tuple((part.request.id, len(part.segment.tokens)) for part in prompts),
            slots_in_use=self._runner.cache.slots.num_used,
            num_waiting=len(waiting.difference(part.request.id for part in prompts)),
            num_swapped=len(swapped),
            num_running=self._table.count("running"),
            swapped=swapped,
            preempted=tuple(self._batches.preempted),
            has_failed=has_failed,
        )
        self._batches.preempted.clear()

"""The engine: one thread that owns the device and serves many requests. A step is: plan, run, choose; tell during the next."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from staticllm.core import FinishReason
from staticllm.errors import BusyError, ClosedError, as_ours
from staticllm.kvcache.step import Segment
from staticllm.pipelines.profiler import HostTimes, Profiler, RequestRecord, StepRecord
from staticllm.pipelines.request import Request
from staticllm.pipelines.runner import Logits, ModelRunner, not_finite
from staticllm.pipelines.scheduling.book import Book, Entry
from staticllm.pipelines.scheduling.planner import Planner
from staticllm.pipelines.scheduling.view import Device, Plan, Policy
from staticllm.pipelines.tenancy import EngineOptions, Tenancy, make_tenancy

Result = TypeVar("Result")


@dataclass(frozen=True)
class Part:
    """What one request has in the next call."""

    request: Request
    segment: Segment
    is_prefill: bool


class Engine:
    """Requests come in by ``submit`` from any thread, tokens go out by their mailboxes. The thread starts with the first."""

    def __init__(self, runner: ModelRunner, policy: Policy, options: EngineOptions) -> None:
        self.profiler = Profiler()
        self._planner = Planner(policy)
        self._next: tuple[ModelRunner, EngineOptions] | None = None
        self._seat(runner, options)
        self._inbox: deque[Request] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._evicted: list[int] = []  # since then
        self._step: StepRecord | None = None  # the last call
        self._unposted: list[Request | StepRecord] = []  # what that has left to be told
        self._num_waiting = 0  # of the requests in the book
        self._is_closing = self._is_draining = False

    def _seat(self, runner: ModelRunner, options: EngineOptions) -> None:
        """Begin with a runner, and with nobody on it."""
        self._runner, self._options = runner, options
        self._variant = runner.index.variants[0]  # of the last call
        self._book = Book(options.limits)
        self._tenancy = make_tenancy(runner.cache, self._book, options)

    def switch(self, runner: ModelRunner, options: EngineOptions) -> None:
        """Go over to another runner when all that run now have ended; who comes meanwhile waits for it.

        Raises:
            ClosedError: the engine was closed.
        """
        with self._wake:
            if self._is_closing:
                raise ClosedError("the pipeline is closed: load the model again")
            self._next = runner, options
            self._start()

    def submit(self, request: Request) -> None:
        """Hand a request over.

        Raises:
            BusyError: as many wait as may.
            ClosedError: the engine was closed.
        """
        with self._wake:
            if self._is_closing:
                raise ClosedError("the pipeline is closed: load the model again")
            num_waiting = len(self._inbox) + self._num_waiting
            if num_waiting >= self._options.max_waiting:
                raise BusyError(
                    f"{num_waiting} requests wait, MAX_WAITING is {self._options.max_waiting}: try again later, "
                    "or load with a larger MAX_WAITING"
                )
            self._inbox.append(request)
            self._start()

    def enqueue(self, requests: Iterable[Request]) -> None:
        """Hand requests over without starting the thread: whoever calls ``step`` serves them."""
        self._inbox.extend(requests)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits and nobody runs."""
        return not self._inbox and not len(self._book)

    def call(self, errand: Callable[[], Result]) -> Result:
        """Run something between two device calls, on the engine's thread, and return what it returns."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(errand())
            except BaseException as error:  # the caller's to handle, not the engine's
                future.set_exception(error)

        with self._wake:
            if self._is_closing:
                raise ClosedError("the pipeline is closed: load the model again")
            self._errands.append(run)
            self._start()
        result: Result = future.result()
        return result

    def close(self, drain: bool = False) -> None:
        """End the thread: after all requests have ended, or at once, cancelling them. Closing again does nothing."""
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
    def tenancy(self) -> Tenancy:
        """Whose rows lie where; only for errands."""
        return self._tenancy

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="staticllm-engine", daemon=True)
            self._thread.start()
        self._wake.notify()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._errands or self._next or len(self._book) or self._is_closing):
                    if self._tenancy.prefix.is_leaving:
                        break
                    self._wake.wait()
                if self._is_closing and not (self._is_draining and (self._inbox or len(self._book))):
                    break
            self.step()
        self._admit()
        for request in self._tenancy.abandon():
            self._report(request, FinishReason.CANCELLED)
        self._run_errands()

    def step(self) -> None:
        """One device call, and what goes before and after it."""
        try:
            self._admit()
            self._sweep()
            self._run_errands()
            if len(self._book):
                self._call()
            if not len(self._book):
                self._post()
                self._tenancy.tidy()
        except Exception as error:  # ours: nobody must wait for ever for an engine that has stopped
            for request in self._tenancy.abandon():
                self._report(request, FinishReason.ERROR, as_ours(error))

    def _call(self) -> None:
        """Plan, run, choose. What is chosen is told, and recorded, while the next call runs."""
        begin = time.perf_counter()
        parts = self._prepare(self._plan())
        ready = time.perf_counter()
        outputs = self._run(parts)
        done = time.perf_counter()
        self._choose_all(parts, outputs)
        runner, step = self._runner, self._step
        assert step is not None
        sampling = time.perf_counter() - done
        host = HostTimes(ready - begin, runner.masks_seconds, runner.rows_seconds, sampling)
        self._unposted += [*(part.request for part in parts), step if step.has_failed else replace(step, host=host)]

    def _meanwhile(self, is_decoding: bool) -> None:
        """While the device runs. Who leaves the arena goes in pieces if somebody waits for the next token."""
        self._post()
        self._tenancy.prefix.advance(is_hurried=not is_decoding)

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
            if self._next and not len(self._book):
                runner_and_options, self._next = self._next, None
                self._seat(*runner_and_options)
            while self._inbox and not self._next:
                request = self._inbox.popleft()
                self._tenancy.requests[request.id] = request
                self._book.add(
                    Entry(request.id, request.arrival, len(request.tokens), request.priority, request.deadline)
                )
            self._num_waiting = self._book.count("waiting")

    def _run_errands(self) -> None:
        while self._errands:
            self._errands.popleft()()

    def _sweep(self) -> None:
        """Between any two calls: who was cancelled, or is late, leaves."""
        now = time.perf_counter()
        for request in list(self._tenancy.requests.values()):
            if request.is_cancelled:
                self._end(request, FinishReason.CANCELLED)
            elif request.deadline is not None and now >= request.deadline:
                self._end(request, FinishReason.DEADLINE)

    def _plan(self) -> Plan:
        device = Device(self._runner.index, self._runner.costs, self._runner.cache.rows.high_row)
        tenancy = self._tenancy
        return self._planner.plan(
            self._book.view(time.perf_counter(), tenancy.free_rows, tenancy.shelf.free_rows, device)
        )

    def _prepare(self, plan: Plan) -> list[Part]:
        """Park, evict, resume; then say what goes into the call."""
        requests = self._tenancy.requests
        for request in plan.evict:
            self._evict(requests[request])
        for request in plan.park:
            self._book.park(request)
            self._tenancy.park(requests[request])
        for request in plan.resume:
            self._tenancy.resume(requests[request])
        parts = [self._part(requests[request], 1, False) for request in plan.decode]
        for request, count in plan.prefill:
            self._tenancy.settle(requests[request])
            parts.append(self._part(requests[request], count, True))
        return self._fitting(parts)

    def _part(self, request: Request, count: int, is_prefill: bool) -> Part:
        assert request.sequence is not None
        start = len(request.sequence)
        tokens = np.asarray(request.tokens[start : start + count], np.int64)
        return Part(request, Segment(request.sequence, tokens), is_prefill)

    def _fitting(self, parts: list[Part]) -> list[Part]:
        """As many as there are rows and a program for. Plans fit; shared rows and found prefixes may leave less room."""
        while parts:
            num_rows = sum(len(part.segment.tokens) for part in parts)
            if self._tenancy.make_room(num_rows) and self._runner.variant_for([part.segment for part in parts]):
                return parts
            if len(parts) == 1:
                break
            parts.pop()
        if parts and (shorter := self._shortened(parts[0])) is not None:
            return self._fitting([shorter])
        victims = [
            r for r in self._tenancy.requests.values() if r.sequence is not None and r not in [p.request for p in parts]
        ]
        assert victims, "a plan without rows, and nobody to take them from"
        self._evict(victims[-1])
        return self._fitting(parts)

    def _evict(self, request: Request) -> None:
        self._tenancy.evict(request)
        self._evicted.append(request.id)

    def _shortened(self, part: Part) -> Part | None:
        """A prompt whose prefix was found needs programs with a past, and there may be only small ones.

        So does one whose tokens no program holds exactly, where no row may be idle.
        """
        for rows in sorted(self._runner.index.widest, reverse=True):
            if rows < len(part.segment.tokens):
                shorter = self._part(part.request, rows, part.is_prefill)
                if self._runner.variant_for([shorter.segment]):
                    return shorter
        return None

    def _run(self, parts: list[Part]) -> list[Logits]:
        """The call. A device that fails takes the requests of this call with it, and nobody else."""
        runner = self._runner
        if not self._tenancy.prefix.is_leaving:  # else there will soon be more room
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
            outputs = runner.run(variant, segments, self._aside(parts), lambda: self._meanwhile(is_decoding))
        except Exception as error:
            self._record(start, time.perf_counter() - start, parts, has_failed=True)
            if not runner.cache.is_settled:
                self._evicted += self._tenancy.reset()
            for part in parts:
                self._end(part.request, FinishReason.ERROR, as_ours(error), is_kept=False)
            return []
        for index, stored in runner.set_aside.items():
            self._tenancy.set_aside(parts[index].request, stored)
        self._record(runner.started, runner.seconds, parts)
        return outputs

    def _aside(self, parts: list[Part]) -> set[int]:
        """Whole prompts that find no slot: their rows go from the call to the shelf, past the arena."""
        if self._book.has_free_slot:
            return set()
        chosen, room = set(), self._tenancy.shelf.free_rows
        for index, part in enumerate(parts):
            count = len(part.segment.tokens)
            is_whole = part.is_prefill and count == len(part.request.tokens)
            if is_whole and not len(part.segment.sequence) and count <= room:
                chosen.add(index)
                room -= count
        return chosen

    def _choose_all(self, parts: list[Part], outputs: list[Logits]) -> None:
        for part, logits, best in zip(parts, outputs, self._runner.best, strict=False):
            request, count = part.request, len(part.segment.tokens)
            if best is None:
                self._end(request, FinishReason.ERROR, not_finite(self._variant), is_kept=False)
            elif self._book.ran(request.id, count):
                self._choose(request, logits, best)

    def _choose(self, request: Request, logits: Logits, best: int) -> None:
        if not request.num_generated and request.sequence is not None:
            self._tenancy.prefix.remember_prompt(request.sequence)
        try:
            reason = request.choose(logits, best)
        except Exception as error:  # of this request's own sampling or text; the others go on
            self._end(request, FinishReason.ERROR, error)
            return
        if reason is not None:
            self._end(request, reason)
            return
        self._book.chose(request.id, time.perf_counter())
        if len(request.tokens) > self._options.capacity and not self._tenancy.shorten(
            request, self._options.capacity // 2
        ):
            self._end(request, FinishReason.LENGTH)
        elif self._book[request.id].state == "parked":
            self._tenancy.park(request)

    def _end(
        self, request: Request, reason: FinishReason, error: Exception | None = None, is_kept: bool = True
    ) -> None:
        self._tenancy.end(request, is_kept)
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
        parked, waiting = self._book.ids("parked"), set(self._book.ids("waiting"))
        self._step = StepRecord(
            start=start,
            seconds=seconds,
            variant=self._variant,
            decode=tuple(part.request.id for part in parts if not part.is_prefill),
            prefill=tuple((part.request.id, len(part.segment.tokens)) for part in prompts),
            rows_in_use=self._runner.cache.rows.num_used,
            num_waiting=len(waiting.difference(part.request.id for part in prompts)),
            num_parked=len(parked),
            num_running=self._book.count("running"),
            parked=parked,
            evicted=tuple(self._evicted),
            has_failed=has_failed,
        )
        self._evicted = []

"""Queues the texts of many callers, and runs them in packed calls, the urgent ones first."""

from __future__ import annotations

import heapq
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from staticllm.core import EncoderVariant
from staticllm.errors import BusyError, ClosedError, NumericalError, StaticLLMError, as_ours, pipeline_closed
from staticllm.pipelines.embedding.batching_delay import BatchingDelay
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner
from staticllm.pipelines.embedding.packing.continued_text import ContinuedText
from staticllm.pipelines.embedding.packing.plan_calls import PackedCall, plan_calls
from staticllm.pipelines.embedding.packing.prefix_groups import find_groups
from staticllm.pipelines.embedding.waiting_texts import Backlog, Plan, PlannedCall, WaitingText
from staticllm.pipelines.engine.jobs import new_source_id
from staticllm.pipelines.scheduling.interface import JobView
from staticllm.pipelines.scheduling.job_turns import Arrears

WINDOW = 512
"""The number of texts that are packed together. More would fill the calls hardly better."""
SMALL_PLAN = 64
"""A plan of fewer texts is made again when others arrive: they fill its calls, and packing so few takes little time."""
NEARLY = 1.1
"""A variant stays in use until its cost exceeds the limit by this factor: costs fluctuate, and planning takes time."""
TOO_LONG = 1e6
"""A variant above the limit, for a text that no other holds, counts this many times its cost, so that no other text uses it."""


class EmbeddingQueue:
    """The texts that wait for one device: the ``JobSource`` of an encoder. Any thread submits and closes.

    Texts of a higher priority come first, then those that arrived first. While higher priorities always wait, the lower ones get
    ``BEHIND_SHARE`` of the device time, so that none waits for ever. ``max_waiting`` is the most texts that may wait.
    """

    def __init__(self, runner: EncoderRunner, max_waiting: int) -> None:
        self.runner, self.id = runner, new_source_id()
        self._max_waiting = max_waiting
        self._wake: Callable[[], None] = lambda: None
        self._max_seconds: float | None = None
        self._lock = threading.RLock()  # the garbage collector may close a pipeline of the user while it is held
        self._is_running = threading.RLock()  # held during a call; what it ends may close the queue
        self._backlogs: dict[int, Backlog] = {}  # priority -> texts that are not planned
        self._plans: dict[int, Plan] = {}
        self._arrears, self._batching_delay = Arrears(), BatchingDelay()
        self._num_waiting = 0
        self._is_closed = False
        self._deadlines: list[tuple[float, int, weakref.ref[EmbeddingRequest]]] = []  # a heap; also of what has ended
        self._dropped: list[EmbeddingRequest] = []  # late or cancelled; they end without the lock

    def attach(self, wake: Callable[[], None]) -> None:
        """Take the function that wakes the device's thread; it is called, without a lock, after a request was added."""
        self._wake = wake

    def submit(self, request: EmbeddingRequest) -> None:
        """Add a request.

        Raises:
            BusyError: the queue has no room for its texts.
            ClosedError: the queue was closed, or the engine that runs it.
        """
        with self._lock:
            if self._is_closed:
                raise pipeline_closed()
            self._check_room(len(request.texts))
            self._backlogs.setdefault(request.priority, Backlog()).add(request)
            self._num_waiting += len(request.texts)
            self._batching_delay.come(request)
            if request.deadline is not None:
                heapq.heappush(self._deadlines, (request.deadline, request.id, weakref.ref(request)))
            plan = self._plans.get(request.priority)
            if plan is not None and sum(len(planned.texts) for planned in plan.calls) < SMALL_PLAN:
                plan.is_stale = True
        try:
            self._wake()
        except BaseException:
            request.future.cancel()  # its texts must not run: the caller gets an error and no vectors
            raise

    @property
    def num_waiting(self) -> int:
        """The number of texts that wait; some of them may have been cancelled."""
        return self._num_waiting

    @property
    def has_jobs(self) -> bool:
        """Whether texts wait, or ends of requests."""
        return self._num_waiting > 0 or bool(self._dropped)

    @property
    def wait_seconds(self) -> float:
        """How much longer the next call should wait for texts that come soon, in seconds."""
        with self._lock:
            return self._batching_delay.seconds(time.perf_counter())

    def next_job(self, max_seconds: float | None = None) -> JobView | None:
        """Return the next call as a policy sees it; None if no text waits.

        ``max_seconds``: no call with fewer texts than that would take longer; None for no limit. The job has the highest
        priority of all texts that wait, because they wait for its end.
        """
        self._max_seconds = max_seconds
        self._prepare()
        with self._lock:
            if (priority := self._turn()) is None:
                return None
            requests = [text.request for text in self._plans[priority].head.texts]
            arrival = min(request.arrival for request in requests)
            deadline = min((r.deadline for r in requests if r.deadline is not None), default=None)
            return JobView(self.id, self._seconds(priority), arrival, max(self._priorities), deadline)

    def run_next(self, meanwhile: Callable[[], None] | None = None) -> int:
        """Run one call, if texts wait, and hand their vectors out. Return its number of texts."""
        with self._is_running:
            self._prepare()
            with self._lock:
                if (priority := self._turn()) is None:
                    return 0
                planned = self._pop(priority)
            try:
                if planned.chunk is not None:
                    self._run_chunk(planned, planned.chunk, meanwhile)
                elif planned.call is not None:
                    self._run(planned.call, planned.texts, meanwhile)
            except BaseException as error:  # the texts of this call must end, or their readers would wait for ever
                for text in planned.texts:
                    text.request.fail(as_ours(error))
            return len(planned.texts)

    def close(self) -> None:
        """End all requests, and drop the programs after the call that runs now; later requests are refused."""
        with self._lock:
            self._is_closed = True
            left = [text.request for plan in self._plans.values() for text in plan.texts]
            left += [request for backlog in self._backlogs.values() for request in backlog.requests]
            left += self._dropped
            self._backlogs, self._plans, self._deadlines, self._dropped = {}, {}, [], []
            self._num_waiting = 0
        for request in {request.id: request for request in left}.values():
            request.fail(ClosedError("the pipeline was closed before these texts were embedded"))
        with self._is_running:
            self.runner.close()

    def _check_room(self, num_new: int) -> None:
        """Raise a ``BusyError`` if so many texts are too many. The lock is held."""
        if not self._num_waiting or self._num_waiting + num_new <= self._max_waiting:
            return
        for backlog in self._backlogs.values():
            backlog.purge(time.perf_counter(), self._drop)
        if self._num_waiting and self._num_waiting + num_new > self._max_waiting:
            raise BusyError(
                f"{self._num_waiting} texts wait, {num_new} more would exceed max_waiting {self._max_waiting}: try again later, "
                "or load with a larger max_waiting"
            )

    def _prepare(self) -> None:
        """Plan, and end late requests without the lock, because what waits for their ends may submit texts or close the queue."""
        with self._lock:
            now = time.perf_counter()
            while self._deadlines and self._deadlines[0][0] <= now:
                request = heapq.heappop(self._deadlines)[2]()
                self._dropped += [request] if request is not None else []
            self._turn()
            dropped, self._dropped = self._dropped, []
        for request in dropped:
            request.fail(StaticLLMError("the deadline passed before all texts were embedded"))

    @property
    def _priorities(self) -> set[int]:
        return self._plans.keys() | self._backlogs.keys()

    def _turn(self) -> int | None:
        """Return the priority whose next call runs, after planning it; None if no text waits. The lock is held."""
        while priorities := self._priorities:
            first = max(priorities)
            if not self._plan(first):
                continue
            behind = priorities - {first}
            if not behind:
                self._arrears.clear()
                return first
            if not self._arrears.covers(self.runner.cost(self.runner.variants[0])):
                return first
            oldest = min(behind, key=self._arrival)
            if self._plan(oldest):
                return oldest if self._arrears.covers(self._seconds(oldest)) else first
        return None

    def _arrival(self, priority: int) -> float:
        plan = self._plans.get(priority)
        return min(text.request.arrival for text in plan.head.texts) if plan else self._backlogs[priority].arrival

    def _seconds(self, priority: int) -> float:
        call, _, chunk = self._plans[priority].head
        variant = self._next_chunk(chunk) if chunk is not None else None if call is None else call.variant
        return 0.0 if variant is None else self.runner.cost(variant)

    def _next_chunk(self, chunk: ContinuedText) -> EncoderVariant:
        return self.runner.next_chunk(chunk, self._max_seconds)

    def _plan(self, priority: int) -> bool:
        """Plan the next texts of a priority, unless its plan is still good. Return False if nobody waits for any of its texts."""
        plan = self._plans.setdefault(priority, Plan())
        backlog = self._backlogs.get(priority, Backlog())
        variants, now = self._variants(plan.variants), time.perf_counter()
        if plan.is_stale or variants != plan.variants:
            backlog.put_back(plan.clear())
            plan.variants = variants
        while True:
            if not plan:
                plan.calls.extend(self._packed(backlog.take(WINDOW, now, self._drop), variants))
            if not plan:
                self._plans.pop(priority, None)
                self._backlogs.pop(priority, None)
                return False
            living = self._living(plan.head.texts, now)
            if living is plan.head.texts:
                break
            plan.pop()
            plan.calls.extendleft(reversed(self._packed(living, variants)))
        if backlog:
            self._backlogs[priority] = backlog
        else:
            self._backlogs.pop(priority, None)
        return True

    def _living(self, texts: list[WaitingText], now: float) -> list[WaitingText]:
        """Return the texts that somebody waits for, the same list if all are; the others are dropped."""
        if not any(text.is_over(now) for text in texts):
            return texts
        living = [text for text in texts if not text.is_over(now)]
        for text in texts:
            if text.is_over(now):
                self._drop(text.request, 1)
        return living

    def _drop(self, request: EmbeddingRequest, num_texts: int) -> None:
        self._num_waiting -= num_texts
        self._dropped.append(request)

    def _pop(self, priority: int) -> PlannedCall:
        """Remove the next call of a priority. The lock is held."""
        plan, seconds = self._plans[priority], self._seconds(priority)
        if priority < max(self._priorities):
            self._arrears.pay(seconds)
        elif len(self._priorities) > 1:
            self._arrears.add(seconds)
        planned = plan.pop()
        if not plan:
            del self._plans[priority]
        self._num_waiting -= len(planned.texts)
        return planned

    def _packed(self, texts: list[WaitingText], allowed: Sequence[EncoderVariant]) -> list[PlannedCall]:
        """Return the calls of these texts, the one with the oldest text first."""
        runner = self.runner
        if len(texts) == 1 and runner.continuing and (chunk := runner.resumed(texts[0].tokens)) is not None:
            return [_in_chunks(texts[0], chunk)]
        long = [text for text in texts if runner.continuing and len(text.tokens) > runner.max_rows]
        if long:
            texts = [text for text in texts if len(text.tokens) <= runner.max_rows]
        chunked = [_in_chunks(text, runner.continued(text.tokens)) for text in long]
        lengths = [len(text.tokens) for text in texts]
        most = max((variant.rows for variant in allowed), default=0)
        needed = {self._cheapest(length) for length in set(lengths) if length > most}

        def cost(variant: EncoderVariant) -> float:
            return runner.cost(variant) * (TOO_LONG if variant in needed else 1.0)

        prefixes = find_groups([text.tokens for text in texts]) if runner.shape.shares_prefixes else None
        calls = plan_calls(lengths, (*allowed, *needed), cost, runner.shape.is_packable, prefixes)
        calls.sort(key=lambda call: min(call.texts))
        packed = [PlannedCall(call, [texts[index] for index in call.texts]) for call in calls]
        return (
            sorted((*packed, *chunked), key=lambda planned: min(text.order for text in planned.texts))
            if long
            else packed
        )

    def _cheapest(self, num_tokens: int) -> EncoderVariant:
        """Return the cheapest variant that holds a text of so many tokens."""
        return min((variant for variant in self.runner.variants if variant.rows >= num_tokens), key=self.runner.cost)

    def _variants(self, planned: Sequence[EncoderVariant]) -> Sequence[EncoderVariant]:
        """Return the variants that keep ``max_seconds``; those of the plan keep it as long as they nearly do."""
        runner, limit = self.runner, self._max_seconds
        if limit is None:
            return runner.variants
        return tuple(v for v in runner.variants if runner.cost(v) <= limit * (NEARLY if v in planned else 1))

    def _run(self, call: PackedCall, texts: list[WaitingText], meanwhile: Callable[[], None] | None) -> None:
        places = iter(texts)
        sequences = [[next(places).tokens for _ in sequence] for sequence in call.sequences]
        begin = time.perf_counter()
        vectors = self.runner.run(call.variant, sequences, meanwhile)
        self._note_served(texts, begin)
        suspects = []
        for text, vector in zip(texts, vectors, strict=True):
            if np.isfinite(vector).all():
                text.request.put(text.index, vector)
            elif len(texts) > 1:
                suspects.append(text)
            else:
                text.request.fail(_not_finite(text.index))
        if suspects:  # another text of the call may be the cause
            with self._lock:
                variants = self._variants(())
            self._run_next([planned for text in reversed(suspects) for planned in self._packed([text], variants)])

    def _run_chunk(self, planned: PlannedCall, chunk: ContinuedText, meanwhile: Callable[[], None] | None) -> None:
        """Run the next chunk of a text. If it is not the last one, the text is the next of its priority again."""
        (text,) = planned.texts
        begin = time.perf_counter()
        vector = self.runner.run_chunk(chunk, self._next_chunk(chunk), meanwhile)
        if vector is None:
            self._run_next([planned])
            return
        self._note_served(planned.texts, begin)
        if np.isfinite(vector).all():
            text.request.put(text.index, vector)
        else:
            text.request.fail(_not_finite(text.index))

    def _note_served(self, texts: Sequence[WaitingText], begin: float) -> None:
        """Note a call that began at the moment ``begin``, before its clients are told: they may ask again at once."""
        with self._lock:
            now, num_requests = time.perf_counter(), len({text.request.id for text in texts})
            self._batching_delay.serve(num_requests, now - begin, not self._num_waiting, now)

    def _run_next(self, calls: list[PlannedCall]) -> None:
        """Let these calls, of one text each, be the next ones of their priorities."""
        with self._lock:
            closed = calls if self._is_closed else []
            for planned in [] if self._is_closed else calls:
                self._plans.setdefault(planned.texts[0].request.priority, Plan()).alone.appendleft(planned)
                self._num_waiting += 1
        for planned in closed:
            planned.texts[0].request.fail(ClosedError("the pipeline was closed before these texts were embedded"))


def _in_chunks(text: WaitingText, chunk: ContinuedText) -> PlannedCall:
    return PlannedCall(None, [text], chunk)


def _not_finite(index: int) -> NumericalError:
    return NumericalError(
        f"text {index}: its embedding is not finite: try INFERENCE_PRECISION_HINT='f32', or check the weights"
    )

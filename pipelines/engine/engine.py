"""The engine serves many requests on one device with one thread."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

from staticllm.core import Clock, FinishReason
from staticllm.errors import BusyError, as_ours, pipeline_closed
from staticllm.system.threads import LazyThread, check_may_wait, check_process, owned_device, run_uninterrupted

from ...kvcache.sequence import AdapterScales, Conditions
from ..costs.probe import Rests
from ..generation.beam_search import BeamRules
from ..profiling.call_watch import CallWatch
from ..profiling.records import EngineProgress
from ..profiling.stats import Profiler, Stats
from ..profiling.trace import MAX_RECORDS, Trace, recording
from ..programs.model_runner import ModelRunner
from ..scheduling.interface import Policy
from .beams import BeamRequest
from .client import SnapshotTarget, UserProcessors
from .client_sequences.sequence import ClientSequence, Feed, begin_feeds
from .device_use import SoleUse
from .engine_core import EngineCore
from .jobs import JobSource
from .kv_manager import KVCacheManager
from .kv_snapshot import load_snapshot, save_snapshot
from .options import EngineOptions, Switch
from .request import Decode, EngineRequest, EngineText, OutputQueue
from .speculation.draft_model import DraftModel
from .state import PreparedGrammar, RequestState, prepare_grammar, progress_of

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Callbacks:
    """Functions that wait for the engine's thread."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()

    def __bool__(self) -> bool:
        """Whether a function is waiting."""
        return bool(self._waiting)

    def add(self, function: Callable[[], object]) -> None:
        """Queue a function, which must not raise. Any thread may call."""
        self._waiting.append(function)

    def ask(self, function: Callable[[], Result]) -> queue.SimpleQueue[Callable[[], Result]]:
        """Queue a function. What is returned gets another one, which returns its result or raises its exception.

        No ``Future``: its lock, which the engine's thread needs to set the result, may stay taken after Ctrl-C in the waiter.
        """
        answers: queue.SimpleQueue[Callable[[], Result]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put(partial(_identity, function()))
            except BaseException as error:
                answers.put(partial(_raise, error))

        self._waiting.append(run)
        return answers

    def run(self) -> None:
        """Call the waiting functions. Runs on the engine's thread."""
        while self._waiting:
            with suppress(BaseException):
                self._waiting.popleft()()


def _identity(value: Result) -> Result:
    return value


def _raise(error: BaseException) -> NoReturn:
    raise error


def new_state(
    request: EngineRequest,
    vocab_size: int,
    queue: OutputQueue | None = None,
    processors: UserProcessors = (),
    grammar: PreparedGrammar | None = None,
    decode: Decode | None = None,
    clock: Clock = time.perf_counter,
) -> RequestState:
    """Return a request as the core runs it. ``decode`` makes text of tokens, to find the stop strings of beams."""
    if request.rules is not None:
        given = processors or [()] * request.num_sequences
        processors = [[*request.rules.processors(vocab_size), *more] for more in given]
    mask = None if grammar is None else grammar.mask
    state: RequestState
    if request.beams is None:
        state = RequestState(request, vocab_size, queue, processors, mask, clock)
    else:
        rules = BeamRules(processors[0]) if processors else None
        state = BeamRequest(request, vocab_size, queue, decode, mask or rules, clock)
    state.queue.compile_times = None if grammar is None else grammar.times
    return state


class Engine:
    """Serves requests on one device: the ``EngineClient`` of this process.

    Any thread may call the methods of ``EngineClient``, ``switch`` and ``run_between_steps``. The ``EngineCore`` runs on the
    engine's thread, which starts with the first request. Without ``text``, requests with grammars are refused, and stop strings
    do not end beams. ``in_use`` is held while a job runs that uses the engine's own keys and values.
    """

    def __init__(
        self,
        runner: ModelRunner,
        policy: Policy,
        options: EngineOptions,
        text: EngineText | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._core = EngineCore(runner, policy, options, clock)
        self.clock = clock
        self.in_use = threading.RLock()
        self._inbox: dict[int, RequestState] = {}  # submitted and not yet admitted, by id
        self._callbacks = Callbacks()
        self._next: Switch | None = None
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._thread = LazyThread("staticllm-engine")
        self._is_closing = False
        self._is_draining = False
        self._has_ended_rest = False
        self._has_news = False  # since the last step began
        self._has_rested = False
        self._rests = Rests()
        self._num_awaiting = 0  # callers that wait for costs
        self._pid = os.getpid()
        self._device_use = SoleUse()
        self._text = text
        self._calls = CallWatch(self._core.profiler.ring, clock)

    def submit(
        self, request: EngineRequest, queue: OutputQueue | None = None, processors: UserProcessors = ()
    ) -> OutputQueue:
        """Submit a request. Its outputs arrive in ``queue``, which is returned; None creates a new one.

        ``processors`` holds the logits processors that a user made, per answer; they run on the engine's thread. A grammar is
        compiled here, on the caller's thread.

        Raises:
            GenerationConfigError: the grammar cannot be compiled, or has no answer that is short enough.
            BusyError: ``MAX_WAITING`` requests are waiting.
            ClosedError: the engine was closed, or belongs to another process.
        """
        self.check_process()
        vocab_size = self._core.serving.vocab_size
        grammar = prepare_grammar(request, vocab_size, self._text.grammars if self._text else None)
        decode = self._text.decode if self._text else None
        state = new_state(request, vocab_size, queue, processors, grammar, decode, self._core.clock)
        self.submit_state(state)
        return state.queue

    def submit_state(self, state: RequestState) -> None:
        """Submit like ``submit``, but with a state that a caller in this process can inspect.

        Raises:
            BusyError, ClosedError: as for ``submit``.
        """
        self.check_process()
        with self._lock:
            limit = self._core.device.options.max_waiting
            num_waiting = len(self._inbox) + len(self._core.requests)  # at most: counting takes as long as the queue
            if num_waiting >= limit and (num_waiting := len(self._inbox) + self._core.num_waiting) >= limit:
                raise BusyError(
                    f"{num_waiting} requests wait, MAX_WAITING is {limit}: try again later, "
                    "or load with a larger MAX_WAITING"
                )
            self._start()
            self._inbox[state.id] = state
        self.hurry(state.priority, state.owner)

    def cancel(self, request: int, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request, or one of its answers, before the next device call. Unknown and ended requests are ignored.

        Takes no lock, because finalizers call it too: the garbage collector runs them at any moment on any thread.
        """
        if os.getpid() != self._pid:
            return
        if (state := self._inbox.get(request) or self._core.requests.get(request)) is not None:
            state.cancel(index, reason)

    def set_priority(self, request: int, priority: int) -> None:
        """Change the priority of a request before the next device call. Unknown and ended requests are ignored.

        Raises:
            ClosedError: the engine was closed.
        """
        if (state := self._inbox.get(request) or self._core.requests.get(request)) is not None:
            self.call_soon(lambda: state.set_priority(priority))
            self.hurry(priority, state.owner)

    def enqueue(self, states: Iterable[RequestState]) -> None:
        """Add requests without starting the thread; the caller serves them with ``step``."""
        with self._lock:
            self._inbox.update((state.id, state) for state in states)

    def check_process(self) -> None:
        """Check that this is the process that the engine belongs to.

        Raises:
            ClosedError: it is a forked child.
        """
        check_process(self._pid)

    def stats(self) -> Stats:
        """Return statistics since the engine was made."""
        return self.profiler.stats()

    def progress(self) -> EngineProgress:
        """Return how far each request is. Any thread may call; the engine's thread does not wait for it."""
        return progress_of((*self._inbox.values(), *self._core.requests.values()), self._core.device.runner)

    def calls_after(self, number: int) -> dict[str, Any]:
        """Return what the engine has done since the call or answer of this number: ``CallWatch.after`` says how."""
        return self._calls.after(number, self.progress(), self.stats())

    def claim(self, session: str, tokens: Sequence[int], adapters: AdapterScales = (), owner: str = "") -> None:
        """Keep the conversation that begins with ``tokens`` longer than those that no session of an ``owner`` has claimed.

        Raises:
            ClosedError: the engine was closed.
        """

        def claim() -> None:
            conditions = self.runner.cache.conditions_at(Conditions(adapters), len(tokens))
            self.kv_manager.host_pool.claim(session, tokens, conditions, owner)

        self.call_soon(claim)

    def drop_claims(self, owner: str) -> None:
        """Drop what the sessions of an owner have claimed, soon.

        Raises:
            ClosedError: the engine was closed.
        """
        self.call_soon(lambda: self.kv_manager.host_pool.drop_claims(owner))

    def record(self, max_records: int = MAX_RECORDS) -> AbstractContextManager[Trace]:
        """Record every step of a ``with`` block.

        Raises:
            StaticLLMError: another recording is in progress.
            ConfigError: ``max_records`` is not a whole number of at least 1.
        """
        return recording(self.profiler, max_records)

    def save_snapshot(self, tokens: list[int], target: SnapshotTarget) -> int:
        """Save the longest prefix of ``tokens`` that is cached, as ``EngineClient`` says."""
        return save_snapshot(self, tokens, target)

    def load_snapshot(self, target: SnapshotTarget) -> int:
        """Read a snapshot into the host pool, as ``EngineClient`` says."""
        return load_snapshot(self, target)

    def switch(self, runner: ModelRunner, options: EngineOptions, on_switch: Callable[[], None] = lambda: None) -> None:
        """Change to another runner when all admitted requests have ended; new requests wait for it.

        ``on_switch`` is called on the engine's thread after the change.

        Raises:
            ClosedError: the engine was closed.
        """
        self.check_process()
        with self._lock:
            self._start()
            self._next = Switch(runner, options, on_switch)

    def run_between_steps(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` on the engine's thread between two device calls, and return what it returns.

        Raises:
            ClosedError: the engine was closed.
            StaticLLMError: this is a device's thread, which would wait for itself.
            Exception: ``function`` raised it.
        """
        self.check_process()
        check_may_wait()
        with self._lock:
            self._start()
            answers = self._callbacks.ask(function)
        return answers.get()()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call ``function``, which must not raise, on the engine's thread between two device calls; do not wait for it.

        Raises:
            ClosedError: the engine was closed.
        """
        self.check_process()
        with self._lock:
            self._start()
            self._callbacks.add(function)

    def open_sequence(self, priority: int = 0, owner: int = 0) -> ClientSequence:
        """Return a new sequence whose tokens the caller chooses; ``feed`` runs them. ``owner`` is as in ``EngineRequest``.

        Raises:
            ClosedError: the engine was closed, or belongs to another process.
        """
        self.check_process()
        return ClientSequence(self, self._core, priority, owner)

    def feed(self, feeds: Sequence[Feed]) -> None:
        """Run tokens of several sequences, in shared calls where possible, and return at once.

        Raises:
            PromptError: a feed has no token, or one outside the vocabulary.
            BusyError: a sequence has a feed in progress.
            ClosedError: a sequence or the engine was closed.
        """
        begin_feeds(self, feeds)
        for each in feeds:
            self.hurry(each.sequence.priority, each.sequence.owner)

    def remove_source(self, source: int) -> None:
        """Give the place of a source of cross-attention to others, soon, once no request sees it.

        Raises:
            ClosedError: the engine was closed.
        """
        self.call_soon(lambda: self._core.remove_source(source))

    def use_draft_model(self, model: DraftModel) -> None:
        """Let a model draft the tokens of requests that ask for it. It runs on the engine's thread.

        Raises:
            ClosedError: the engine was closed, or belongs to another process.
        """
        self.run_between_steps(lambda: self._core.device.draft_planner.use_model(model))

    def share_device(self, use: SoleUse) -> None:
        """Take turns with others on the device; to be called before the first request."""
        self._device_use = use

    def hurry(self, priority: int, owner: int) -> None:
        """Ask for the device with a higher priority, if the engine waits for it with a lower one. Any thread may call."""
        self._device_use.hurry(priority, owner)

    def add_jobs(self, source: JobSource) -> None:
        """Run the jobs of a source beside the requests from now on; the policies decide when.

        Raises:
            ClosedError: the engine was closed, or belongs to another process.
        """
        self.check_process()
        self._core.jobs.add(source)
        source.attach(self._notify)
        if source.has_jobs:
            self._notify()

    def remove_jobs(self, source: JobSource) -> None:
        """Close a source after its current job. Nothing happens if the engine has closed it already."""
        if os.getpid() == self._pid:
            self._core.jobs.remove(source)

    def detach_jobs(self, source: JobSource) -> None:
        """Begin no more jobs of a source, which stays open for another host. One that runs now goes on."""
        self._core.jobs.detach(source)

    def close(self, drain: bool = False) -> None:
        """End the thread: with ``drain`` after all requests and jobs have ended, else at once, and cancel them.

        A second call does nothing, and neither does a call in a forked child: the thread and the lock belong to the parent.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._is_closing = True
            self._is_draining = drain
            self._wake.notify_all()
        if self._thread.is_current:
            return  # it ends when everything has ended, and then closes the core
        self._thread.join()
        if not self._thread.has_begun:
            run_uninterrupted(self._leave, "staticllm-close")
        self._close_parts()

    def _leave(self) -> None:
        """End what is left, in place of the engine's thread. A second call waits for the first."""
        with self.in_use:
            self._end_rest()

    def _close_parts(self) -> None:
        self._device_use.close()
        self._core.close()
        self._text = None  # it holds the tokenizer

    @property
    def is_idle(self) -> bool:
        """Whether the engine has neither requests nor jobs."""
        return not self.num_requests and not self._core.jobs.has_jobs

    @property
    def num_requests(self) -> int:
        """The number of requests that have not ended."""
        return len(self._inbox) + len(self._core.requests)

    @property
    def profiler(self) -> Profiler:
        """The records of the engine's calls and requests."""
        return self._core.profiler

    @property
    def runner(self) -> ModelRunner:
        """The current runner; to be used only inside ``run_between_steps``."""
        return self._core.device.runner

    @property
    def kv_manager(self) -> KVCacheManager:
        """The current KV cache manager; to be used only inside ``run_between_steps``."""
        return self._core.device.kv_manager

    def step(self) -> None:
        """Admit requests, run callbacks, and let the core make one step. Runs on the engine's thread."""
        with self._guarded():
            self._admit()
            self._callbacks.run()
            with self._turn():
                self._core.step()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Own the device in a block, and end every request after an error in it, or its reader would wait forever."""
        try:
            with owned_device():
                yield
        except BaseException as error:  # a bug of ours
            try:
                self._core.end_all(FinishReason.ERROR, as_ours(error))
            except Exception:
                self._core.drop_all(as_ours(error))

    def _turn(self) -> AbstractContextManager[None]:
        """Return the turn of the next step on the device. A step without a call needs none."""
        if not self._core.has_calls:
            return nullcontext()
        return self._device_use.turn(self._core, self._core.device.options.limits)

    def _measure_next(self) -> None:
        """Measure one cost, unless others use the device. A rest follows, if one is due and nobody waits for the costs."""
        self._has_rested = False
        try:
            with self._device_use.measure():
                must_rest = self._rests.measure(
                    lambda: self._core.measure_next(lambda: self._is_needed or self._device_use.is_wanted),
                    is_awaited=self._num_awaiting > 0,
                )
            self._has_rested = not must_rest
        except Exception:  # costs are only estimates: the thread must go on
            logger.warning("costs are no longer measured", exc_info=True)
            self._core.device.runner.probe.pause()

    @contextmanager
    def costs_awaited(self) -> Iterator[None]:
        """Measure costs in a block whatever else runs, because somebody waits for them."""
        with self._lock:
            self._num_awaiting += 1
            self._wake.notify_all()  # ends a long rest
        try:
            yield
        finally:
            with self._lock:
                self._num_awaiting -= 1

    def _notify(self) -> None:
        """Wake the thread, because a job was added."""
        self.check_process()
        with self._lock:
            self._start()

    def _start(self) -> None:
        """Start the thread if necessary, and wake it. The caller holds the lock."""
        if self._is_closing:
            raise pipeline_closed()
        self._thread.start(self._loop)
        self._has_news = True
        self._wake.notify_all()

    def _loop(self) -> None:
        while (work := self._next_work()) is not None:
            work()
        self._end_rest()

    def _next_work(self) -> Callable[[], None] | None:
        """Wait until there is something to do, and return it: a step, or after a rest a measurement. None at the end."""
        core = self._core
        with self._lock:
            if self._is_needed or core.device.is_offloading:
                if core.wait_until is not None and not (self._has_news or self._is_closing):
                    self._wake.wait(max(0.0, core.wait_until - core.clock()))
            elif not (self._has_rested and core.device.has_unknown_costs):
                self._has_rested = self._wait_through_rest()
            self._has_rested = self._has_rested and not self._is_needed
            if self._is_closing and not (self._is_draining and not self.is_idle):
                return None
        return self._measure_next if self._has_rested else self.step

    def _wait_through_rest(self) -> bool:
        """Wait for news, and return whether none came in the time of a rest. The caller holds the lock."""
        if not self._core.device.has_unknown_costs:
            self._wake.wait()
            return False
        self._rests.begin()
        return not self._wake.wait(self._rests.seconds(self._num_awaiting > 0))

    def _end_rest(self) -> None:
        """End what is left, and close the core."""
        with self._lock:  # nothing is added after this: the engine is closing
            left = list(self._inbox.values())
            self._next = None
            self._inbox.clear()
            has_ended = self._has_ended_rest
            self._has_ended_rest = True
        if has_ended:
            return
        for state in left:
            self._core.refuse(state, FinishReason.CANCELLED)
        self._callbacks.run()
        self._core.end_all(FinishReason.CANCELLED)
        self._close_parts()

    @property
    def _is_needed(self) -> bool:
        """Whether the engine's thread has something to do for others."""
        return not self.is_idle or bool(self._callbacks or self._next or self._is_closing)

    def _admit(self) -> None:
        """Pass submitted requests to the core; before a switch they stay in the inbox, and may end there."""
        with self._lock:
            self._has_news = False
            if self._next and not self._core.requests:
                switch = self._next
                self._next = None
                self._core.serving.install(switch.runner, switch.options)
                switch.on_switch()
            is_switching = self._next is not None
            while self._inbox and not self._next:
                id, state = next(iter(self._inbox.items()))
                try:
                    self._core.admit(state)
                finally:
                    del self._inbox[id]  # always in one of the two tables: cancel looks into them without the lock
            states = list(self._inbox.values())
        if is_switching:
            self._core.feeds.hold()
        elif self._core.feeds.is_holding:
            self._core.feeds.release()
        for state in states:
            if (reason := state.sequences[0].finish_reason_at(self._core.clock())) is not None:
                with self._lock:
                    del self._inbox[state.id]
                self._core.refuse(state, reason)

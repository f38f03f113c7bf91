"""The engine serves many requests on one device with one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from staticllm.core import Clock, FinishReason
from staticllm.system.threads import check_may_wait

from ...kvcache.sequence import AdapterScales, Conditions
from ..generation.beam_search import BeamRules
from ..profiling.call_watch import CallWatch
from ..profiling.records import EngineProgress
from ..profiling.stats import Stats
from ..profiling.trace import MAX_RECORDS, Trace, recording
from ..programs.model_runner import ModelRunner
from ..scheduling.interface import Policy
from .beams import BeamRequest
from .client import SnapshotTarget, UserProcessors
from .client_sequences.sequence import Feed, begin_feeds
from .engine_core import EngineCore
from .hosted_steps import HostedSteps
from .jobs import JobHost, JobSource
from .kv_snapshot import load_snapshot, save_snapshot
from .options import EngineOptions, Switch
from .own_thread import OwnThread
from .request import Decode, EngineRequest, EngineText, OutputQueue
from .state import PreparedGrammar, RequestState, prepare_grammar, progress_of
from .step_host import StepHost
from .steps import EngineSteps

Result = TypeVar("Result")


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

    Any thread may call its methods. Its steps run on a thread of its own, which starts with the first request, or with ``host``
    as jobs of the engine that owns the device. Without ``text``, requests with grammars are refused, and stop strings do not end
    beams.

    Attributes:
        core: What serves the requests; to be used on the thread that makes the steps, as in ``run_between_steps``.
        steps: What other threads hand in, and the steps.
        step_host: Whose thread makes them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        policy: Policy,
        options: EngineOptions,
        text: EngineText | None = None,
        clock: Clock = time.perf_counter,
        host: JobHost | None = None,
    ) -> None:
        self.core = EngineCore(runner, policy, options, clock)
        self.clock = clock
        self.steps = EngineSteps(self.core, text)
        self.step_host: StepHost = OwnThread(self.steps) if host is None else HostedSteps(self.steps, host)
        self._calls = CallWatch(self.core.profiler.ring, clock)

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
        text = self.steps.text
        vocab_size = self.core.serving.vocab_size
        grammar = prepare_grammar(request, vocab_size, text.grammars if text else None)
        decode = text.decode if text else None
        state = new_state(request, vocab_size, queue, processors, grammar, decode, self.core.clock)
        self.submit_state(state)
        return state.queue

    def submit_state(self, state: RequestState) -> None:
        """Submit like ``submit``, but with a state that a caller in this process can inspect.

        Raises:
            BusyError, ClosedError: as for ``submit``.
        """
        self.check_process()
        with self.steps.lock:
            self.steps.check_room()
            self.step_host.need()
            self.steps.add([state])
        self.hurry(state.priority, state.owner)

    def cancel(self, request: int, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request, or one of its answers, before the next device call. Unknown and ended requests are ignored.

        Takes no lock, because finalizers call it too: the garbage collector runs them at any moment on any thread.
        """
        if self.step_host.is_ours and (state := self.steps.find(request)) is not None:
            state.cancel(index, reason)

    def set_priority(self, request: int, priority: int) -> None:
        """Change the priority of a request before the next device call. Unknown and ended requests are ignored.

        Raises:
            ClosedError: the engine was closed.
        """
        if (state := self.steps.find(request)) is not None:
            self.call_soon(lambda: state.set_priority(priority))
            self.hurry(priority, state.owner)

    def check_process(self) -> None:
        """Check that this is the process that the engine belongs to.

        Raises:
            ClosedError: it is a forked child.
        """
        self.step_host.check_process()

    def stats(self) -> Stats:
        """Return statistics since the engine was made."""
        return self.core.profiler.stats()

    def progress(self) -> EngineProgress:
        """Return how far each request is. Any thread may call; the engine's thread does not wait for it."""
        return progress_of((*self.steps.inbox.values(), *self.core.requests.values()), self.runner)

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
            self.core.device.kv_manager.host_pool.claim(session, tokens, conditions, owner)

        self.call_soon(claim)

    def drop_claims(self, owner: str) -> None:
        """Drop what the sessions of an owner have claimed, soon.

        Raises:
            ClosedError: the engine was closed.
        """
        self.call_soon(lambda: self.core.device.kv_manager.host_pool.drop_claims(owner))

    def record(self, max_records: int = MAX_RECORDS) -> AbstractContextManager[Trace]:
        """Record every step of a ``with`` block.

        Raises:
            StaticLLMError: another recording is in progress.
            ConfigError: ``max_records`` is not a whole number of at least 1.
        """
        return recording(self.core.profiler, max_records)

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
        with self.steps.lock:
            self.step_host.need()
            self.steps.next_runner = Switch(runner, options, on_switch)

    def run_between_steps(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` on the engine's thread between two device calls, and return what it returns.

        Raises:
            ClosedError: the engine was closed.
            StaticLLMError: this is a device's thread, which would wait for itself.
            Exception: ``function`` raised it.
        """
        self.check_process()
        check_may_wait()
        with self.steps.lock:
            self.step_host.need()
            answers = self.steps.callbacks.ask(function)
        return answers.get()()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call ``function``, which must not raise, on the engine's thread between two device calls; do not wait for it.

        Raises:
            ClosedError: the engine was closed.
        """
        self.check_process()
        with self.steps.lock:
            self.step_host.need()
            self.steps.callbacks.add(function)

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

    def hurry(self, priority: int, owner: int) -> None:
        """Ask for the device with a higher priority, if the engine waits for it with a lower one. Any thread may call."""
        self.steps.device_use.hurry(priority, owner)

    def add_jobs(self, source: JobSource) -> None:
        """Run the jobs of a source beside the requests from now on; the policies decide when.

        Raises:
            ClosedError: the engine was closed, or belongs to another process.
        """
        self.step_host.add_jobs(source)

    def remove_jobs(self, source: JobSource) -> None:
        """Close a source after its current job. Nothing happens if the engine has closed it already."""
        self.step_host.remove_jobs(source)

    def detach_jobs(self, source: JobSource) -> None:
        """Begin no more jobs of a source, which stays open for another host. One that runs now goes on."""
        self.step_host.detach_jobs(source)

    def close(self, drain: bool = False) -> None:
        """End the thread: with ``drain`` after all requests and jobs have ended, else at once, and cancel them.

        A second call does nothing, and neither does a call in a forked child: the thread and the lock belong to the parent.
        """
        if self.step_host.is_ours:
            self.step_host.close(drain)

    @property
    def is_idle(self) -> bool:
        """Whether the engine has neither requests nor jobs."""
        return not self.step_host.is_busy

    @property
    def runner(self) -> ModelRunner:
        """The current runner; to be used only inside ``run_between_steps``."""
        return self.core.device.runner

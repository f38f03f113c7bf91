"""The steps of an engine: what other threads hand in, and the core that serves it."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import NoReturn, TypeVar

from staticllm.core import FinishReason
from staticllm.errors import BusyError, as_ours
from staticllm.system.threads import owned_device

from .device_use import SoleUse
from .engine_core import EngineCore
from .options import Switch
from .request import EngineText
from .sequence import ActiveRequest
from .state import RequestState

Result = TypeVar("Result")


class Callbacks:
    """Functions that wait for the engine's thread."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()

    def __len__(self) -> int:
        """The number of functions that wait."""
        return len(self._waiting)

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


class EngineSteps:
    """Makes the steps of one core, on the thread of whichever host has it.

    Any thread may hand in requests, functions and another runner, while it holds ``lock``. ``in_use`` is held while a step of a
    hosted engine runs, or a job that uses the engine's own keys and values.
    """

    def __init__(self, core: EngineCore, text: EngineText | None = None) -> None:
        self.core = core
        self.text = text  # of the tokenizer; None once the core is closed
        self.lock = threading.RLock()
        self.in_use = threading.RLock()
        self.inbox: dict[int, RequestState] = {}  # submitted and not yet admitted, by id
        self.callbacks = Callbacks()
        self.next_runner: Switch | None = None
        self.has_news = False  # since the last step began
        self.device_use = SoleUse()
        self._has_ended = False

    @property
    def num_requests(self) -> int:
        """The number of requests that have not ended."""
        return len(self.inbox) + len(self.core.requests)

    @property
    def is_needed(self) -> bool:
        """Whether a step would do something, jobs apart."""
        return bool(self.num_requests or self.callbacks or self.next_runner)

    def find(self, request: int) -> ActiveRequest | None:
        """Return a request that has not ended. It takes no lock, because finalizers call it on any thread at any moment."""
        return self.inbox.get(request) or self.core.requests.get(request)

    def check_room(self) -> None:
        """Check that one more request may wait. The caller holds the lock.

        Raises:
            BusyError: ``MAX_WAITING`` requests are waiting.
        """
        limit = self.core.device.options.max_waiting
        num_waiting = self.num_requests  # at most: counting takes as long as the queue
        if num_waiting >= limit and (num_waiting := len(self.inbox) + self.core.num_waiting) >= limit:
            raise BusyError(
                f"{num_waiting} requests wait, MAX_WAITING is {limit}: try again later, or load with a larger MAX_WAITING"
            )

    def add(self, states: Iterable[RequestState]) -> None:
        """Add requests to the inbox."""
        with self.lock:
            self.inbox.update((state.id, state) for state in states)

    def step(self) -> None:
        """Take what was handed in, and let the core make one step in its turn on the device."""
        self.guarded(self._step, None)

    def _step(self) -> None:
        self.take()
        with self._turn():
            self.core.step()

    def guarded(self, function: Callable[[], Result], otherwise: Result) -> Result:
        """Return what ``function`` returns while this thread owns the device.

        If it raises, end every request, whose reader would wait forever, and return ``otherwise``.
        """
        try:
            with owned_device():
                return function()
        except BaseException as error:  # a bug of ours
            try:
                self.core.end_all(FinishReason.ERROR, as_ours(error))
            except Exception:
                self.core.drop_all(as_ours(error))
            return otherwise

    def take(self) -> None:
        """Pass requests to the core, and run callbacks. Before a switch, requests stay in the inbox and may end there."""
        with self.lock:
            self.has_news = False
            if self.next_runner and not self.core.requests:
                switch = self.next_runner
                self.next_runner = None
                self.core.serving.install(switch.runner, switch.options)
                switch.on_switch()
            is_switching = self.next_runner is not None
            while self.inbox and not self.next_runner:
                id, state = next(iter(self.inbox.items()))
                try:
                    self.core.admit(state)
                finally:
                    del self.inbox[id]  # always in one of the two tables: cancel looks into them without the lock
            states = list(self.inbox.values())
        if is_switching:
            self.core.feeds.hold()
        elif self.core.feeds.is_holding:
            self.core.feeds.release()
        for state in states:
            if (reason := state.sequences[0].finish_reason_at(self.core.clock())) is not None:
                with self.lock:
                    del self.inbox[state.id]
                self.core.refuse(state, reason)
        self.callbacks.run()

    def _turn(self) -> AbstractContextManager[None]:
        """Return the turn of the next step on the device. A step without a call needs none."""
        if not self.core.has_calls:
            return nullcontext()
        return self.device_use.turn(self.core, self.core.device.options.limits)

    def end(self) -> None:
        """End what is left, and close the core; nothing may be added any more. A second call does nothing."""
        with self.lock:
            left = list(self.inbox.values())
            self.next_runner = None
            self.inbox.clear()
            has_ended = self._has_ended
            self._has_ended = True
        if has_ended:
            return
        for state in left:
            self.core.refuse(state, FinishReason.CANCELLED)
        self.callbacks.run()
        self.core.end_all(FinishReason.CANCELLED)
        self.close()

    def close(self) -> None:
        """Close the core, and leave the device. A second call does nothing."""
        self.text = None
        self.device_use.close()
        self.core.close()

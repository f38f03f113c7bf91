"""One connection to an engine in the daemon: requests go there as plain values, and a thread reads what comes back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from staticllm.children.answers import check
from staticllm.core import FinishReason
from staticllm.errors import (
    ClosedError,
    ConfigError,
    ProcessLostError,
    StaticLLMError,
    as_ours,
    last_line,
    pipeline_closed,
)
from staticllm.system.threads import InterruptibleFuture, start_thread
from staticllm.wire import tensors
from staticllm.wire.endpoint import SilentError
from staticllm.wire.messages import LAST, MAX_FRAME, Kind, Message, ProtocolError

from ..engine.request import CompileTimes, EngineRequest, Finished, OutputQueue, output_from_dict
from .daemon_link import GONE, DaemonLink

log = logging.getLogger(__name__)
QUESTION = 1 << 62
"""Numbers from here on are those of questions; smaller ones are those of requests."""
TOO_LONG = (
    f"a request of more than {MAX_FRAME} bytes cannot go to the daemon: shorten its prompt, grammar or lists of tokens, or load "
    "the model in this program (daemon=False, STATICLLM_ATTACH=off)"
)
MAX_PART = MAX_FRAME // 2
"""The most bytes of features in one message."""
OnLost = Callable[[], object]


@dataclass
class RunningRequest:
    """The reader of a request, and its answers that have not ended."""

    queue: OutputQueue
    left: set[int]


class EngineConnection:
    """Carries requests to model ``handle`` of a daemon, and their outputs. Any thread may call the methods.

    When the daemon ends, every request that it has accepted ends with a ``ProcessLostError``, and then ``on_lost`` is called on
    the connection's own thread. It must not wait: ``close`` waits for that thread.

    No thread holds the lock of the tables while it sends, or the thread that reads could wait for a send that waits for what is
    to be read. What needs no answer is sent by a thread of its own, because finalizers ask for it too: the garbage collector
    runs them at any moment, also on a thread that is sending.
    """

    def __init__(self, link: DaemonLink, handle: int, on_lost: OnLost, num_cross_windows: int = 0) -> None:
        """``num_cross_windows``: the windows of a speech model that this program may have at a time."""
        self.num_cross_windows = num_cross_windows
        self._link = link
        self._handle = handle
        self._on_lost = on_lost
        self._channel = link.connection
        self._running: dict[int, RunningRequest] = {}  # by id
        self.answers: dict[int, InterruptibleFuture[Message]] = {}  # by the question's number
        self._numbers = count(1)
        self._lock = threading.Lock()  # of the tables
        self._sending = threading.Lock()
        self._aligning = threading.Lock()  # the answer lies in the one block of shared memory
        self._is_closed = False
        self._is_lost = False
        self._channel.watch(self._check_silence)
        self._notices: SimpleQueue[Message | None] = SimpleQueue()  # what is sent without waiting for an answer
        try:
            self.notifier = start_thread(self._send_notices, "staticllm-remote-notices")
            self.thread = start_thread(self._read, "staticllm-remote")
        except BaseException:  # Ctrl-C: they may have begun; the second one ends with the connection
            self._is_closed = True
            self._notices.put(None)
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the daemon is still there, as far as is known."""
        return not self._is_lost

    @property
    def was_stopped(self) -> bool:
        """Whether a daemon that has ended did so as asked."""
        return self._link.was_stopped

    def submit(self, request: EngineRequest, queue: OutputQueue) -> CompileTimes | None:
        """Submit a request, and return when the daemon has accepted it; ``queue`` gets its outputs.

        Returns what its grammar took to compile, if it has one.

        Raises:
            ProcessLostError: the daemon has ended before it accepted the request; nothing was put into ``queue``.
            StaticLLMError: it was refused.
        """
        with self._lock:
            self._running[request.id] = RunningRequest(queue, set(range(request.num_sequences)))
        try:
            body = {"request": request.to_dict(), "window": request.cross_window}
            answer = self.ask(Message(Kind.SUBMIT, number=request.id, body=body))
        except BaseException as error:
            self._forget(request.id)
            if not isinstance(error, StaticLLMError):  # Ctrl-C: the daemon may have accepted it
                self.cancel(request.id)
            raise
        times = answer.body.get("grammar")
        return None if times is None else CompileTimes(**times)

    def cancel(self, request: int, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request, or one of its answers, soon; the daemon ignores unknown ones. Takes no lock."""
        self.tell(Message(Kind.CANCEL, body={"request": request, "index": index, "reason": str(reason)}))

    def encode(self, window: int, features: NDArray[np.float32], priority: int, released: Sequence[int] = ()) -> float:
        """Let the daemon encode a window, ``features [bands, columns]``, whose ``window`` is a number of this program.

        It releases those in ``released`` before, as ``release_window`` says. Returns the seconds of device time that a window
        takes.

        Raises:
            StaticLLMError: as for ``ask``.
        """
        num_bands = max(1, MAX_PART // features[0].nbytes)
        seconds = 0.0
        for first in range(0, len(features), num_bands):
            part = features[first : first + num_bands]
            body = {"window": window, "first": first, "priority": priority, "tensors": tensors.describe([part], [0])}
            body["released"] = list(released)
            seconds = self.ask(Message(Kind.ENCODE, body=body, payload=part.tobytes())).time
        return seconds

    def release_window(self, window: int) -> None:
        """Let the daemon release a window soon, or give it up if it is being encoded; it ignores unknown ones. Takes no lock."""
        self.tell(Message(Kind.RELEASE_WINDOW, body={"window": window}))

    def align(self, window: int, tokens: Sequence[int], priority: int) -> NDArray[np.float32]:
        """Return the weights ``[heads, tokens, cross_window_len]`` of a text about a window.

        Raises:
            StaticLLMError: as for ``ask``.
        """
        with self._aligning:
            answer = self.ask(
                Message(Kind.ALIGN, body={"window": window, "tokens": list(tokens), "priority": priority})
            )
            ((_, weights),) = self._channel.tensors_of(answer)
            return np.array(weights)

    def has(self, request: int) -> bool:
        return request in self._running

    def ask(self, message: Message) -> Message:
        """Send a question about the model and wait for its answer, while outputs of requests go on.

        Raises:
            ClosedError: the connection was closed.
            ConfigError: the message is too large.
            ProcessLostError: the daemon has ended.
            StaticLLMError: it refused, or failed.
        """
        future = InterruptibleFuture[Message]()
        with self._lock:
            if self._is_lost:
                raise ProcessLostError(GONE)
            if self._is_closed:
                raise pipeline_closed()
            number = message.number or QUESTION + next(self._numbers)
            self.answers[number] = future
        try:
            with self._sending:
                self._channel.send(replace(message, handle=self._handle, number=number))
        except BaseException as error:
            with self._lock:
                self.answers.pop(number, None)
                self._running.pop(number, None)  # in one step: a request may be submitted again
                if isinstance(error, (OSError, SilentError)) and not self._is_closed:
                    self._is_lost = True  # the thread that reads may see it later
            if isinstance(error, SilentError):
                self._channel.shut()  # half of the message may have been sent
                raise ProcessLostError(str(error)) from error
            if isinstance(error, OSError):
                raise ProcessLostError(GONE) from error
            if isinstance(error, ProtocolError):
                raise ConfigError(TOO_LONG) from None
            raise
        try:
            answer = future.result()
        except BaseException:  # Ctrl-C
            with self._lock:
                self.answers.pop(number, None)
            raise
        check(answer)
        return answer

    def tell(self, message: Message) -> None:
        """Send a message about the model soon; takes no lock, so finalizers may call.

        A daemon that has ended is ignored, and a message that cannot be sent is logged.
        """
        self._notices.put(Message(message.kind, self._handle, QUESTION + next(self._numbers), body=message.body))

    def close(self) -> None:
        """End this program's requests, and give the model back. A second call ends what an interrupted one has left."""
        with self._lock:
            self._is_closed = True
        self._notices.put(None)
        self._channel.shut()  # a thread that is sending returns as well
        self.notifier.join()
        if self.thread is not threading.current_thread():
            self.thread.join()
        self._link.close()

    def _send_notices(self) -> None:
        while (message := self._notices.get()) is not None:
            try:
                with self._sending:
                    self._channel.send(message)
            except SilentError:
                self._channel.shut()  # half of the message may have been sent
            except OSError:
                pass  # the thread that reads sees it as well
            except Exception as error:  # of this message: it is too long, or not JSON
                log.warning("%s was not sent to the daemon: %s", message.kind.name, last_line(error))

    def _read(self) -> None:
        """Read outputs and answers until the connection ends; then end everything that waits."""
        error: Exception = ProcessLostError(GONE)
        try:
            while True:
                self._take(self._channel.receive())
        except (EOFError, OSError):
            pass
        except SilentError as silence:
            error = ProcessLostError(str(silence))
            self._channel.shut()  # a thread that is sending returns as well; a daemon that goes on drops the requests
        except (ProtocolError, KeyError, TypeError, ValueError) as damaged:
            error = as_ours(damaged)
        with self._lock:
            is_closed = self._is_closed and not self._is_lost
            self._is_lost = not is_closed
            answers = dict(self.answers)
            running = dict(self._running)
            self.answers.clear()
            self._running.clear()
        reason = FinishReason.CANCELLED if is_closed else FinishReason.ERROR
        for id, each in running.items():
            for index in each.left if id not in answers else ():  # one that was not accepted may be submitted again
                each.queue.put(Finished(reason, None if is_closed else error, index))
        for future in answers.values():
            future.set_exception(error)
        if not is_closed:
            self._on_lost()

    def _check_silence(self) -> None:
        """Check that the daemon still answers, if a request or a question waits.

        Raises:
            SilentError: it does not.
        """
        if self._running or self.answers:
            self._link.check_silence()

    def _take(self, message: Message) -> None:
        if message.kind is not Kind.OUTPUT:
            with self._lock:
                future = self.answers.pop(message.number, None)
            if future is not None:
                future.set_result(message)
            return
        with self._lock:
            running = self._running.get(message.number)
        if running is None:
            return
        for values in message.body["outputs"]:
            output = output_from_dict(values)
            if isinstance(output, Finished):
                running.left.discard(output.index)
                if isinstance(output.error, ProcessLostError):  # of a process behind the daemon, which itself is there
                    output = replace(output, error=ClosedError(str(output.error)))
            if message.flags & LAST and values is message.body["outputs"][-1]:
                self._forget(message.number)
            running.queue.put(output)

    def _forget(self, request: int) -> None:
        with self._lock:
            self._running.pop(request, None)

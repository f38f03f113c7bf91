"""Sends the tokens of a client's requests over its connection, on a separate thread, so that no engine waits for a client."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from staticllm.children.answers import refused
from staticllm.core import FinishReason
from staticllm.daemon.clients.blocks import TensorSender
from staticllm.daemon.clients.session import Session
from staticllm.daemon.infer_request import Array
from staticllm.daemon.models.language_model import LanguageModel
from staticllm.errors import BusyError, ClosedError
from staticllm.pipelines.engine.request import CompileTimes, Finished, Output, OutputQueue, TokenOutput, output_to_dict
from staticllm.system.threads import start_thread
from staticllm.wire.channel import Channel
from staticllm.wire.messages import LAST, Kind, Message

MAX_RUNNING = 256
"""The most requests of one connection that have not ended."""
MAX_OUTPUTS = 512
"""The most outputs in one message."""
MAX_BACKLOG = 1 << 16
"""The most outputs that wait for a client to read; beyond them its requests are cancelled."""


class WindowNumbers(NamedTuple):
    """A window that a request sees: the client's number of it, and the engine's; 0 without one."""

    of_client: int = 0
    of_engine: int = 0


NO_WINDOW = WindowNumbers()


@dataclass(frozen=True)
class LateAnswer:
    """An answer that comes later than the next question, and its tensors, if it has some."""

    message: Message
    arrays: Sequence[Array] = ()


@dataclass
class Running:
    """A request that has not ended: its model, our number of it, the priority that it asked for, and the answers left."""

    model: LanguageModel
    id: int
    window: int
    """The client's number of the window that it sees; 0 without one."""
    priority: int
    num_left: int
    submitted: float
    has_begun: bool = False


class OutputStream:
    """The requests of one connection. ``submit`` and ``cancel`` run on the connection's thread."""

    def __init__(self, channel: Channel, lock: threading.Lock, session: Session) -> None:
        self._channel = channel
        self._tensors = TensorSender(session, channel, lock)
        self._channel_lock = lock
        self._session = session
        self._outputs: queue.SimpleQueue[tuple[int, Output] | LateAnswer | None] = queue.SimpleQueue()
        self.running: dict[int, Running] = {}  # by the client's number
        self._is_broken = False
        self._breaking = threading.Lock()
        self.thread = start_thread(self._run, "staticllm-stream")

    def submit(
        self, model: LanguageModel, number: int, values: Mapping[str, Any], window: WindowNumbers = NO_WINDOW
    ) -> CompileTimes | None:
        """Submit a request of the client; its outputs follow under the client's own ``number``.

        Return what its grammar took to compile; None without one. ``window`` is the one that the request sees.

        Raises:
            BusyError: the client or the engine has too many requests.
            PromptError, ConfigError: the request is not one.
        """
        if len(self.running) >= MAX_RUNNING:
            raise BusyError(f"this program has {MAX_RUNNING} requests that have not ended: wait for one")
        if number in self.running:
            raise BusyError(f"request {number} has not ended")
        request = replace(model.request_of(values), cross_window=window.of_engine)
        asked = request.priority
        session = self._session
        priority = session.priority
        request = replace(request, priority=asked + priority, owner=session.client.number)
        outputs = OutputQueue()
        outputs.add_listener(lambda output: self._add(number, output))
        self.running[number] = Running(
            model, request.id, window.of_client, asked, request.num_sequences, time.perf_counter()
        )
        try:
            model.engine.submit(request, outputs)
        except BaseException:
            del self.running[number]
            raise
        if session.priority != priority:  # it changed before the engine knew the request
            self.set_priority(session.priority)
        return outputs.compile_times

    def cancel(self, number: int, index: int | None, reason: FinishReason) -> None:
        """End a request, or one of its answers; unknown ones are ignored."""
        if (found := self.running.get(number)) is not None:
            found.model.engine.cancel(found.id, index, reason)

    def cancel_about(self, window: int) -> None:
        """End the requests that see a window of the client."""
        for each in tuple(self.running.values()):
            if each.window == window:
                each.model.engine.cancel(each.id)

    def answer(self, answer: LateAnswer) -> None:
        """Send an answer soon. Any thread may call: it does not wait."""
        self._put(answer)

    def set_priority(self, priority: int) -> None:
        """Change the client's priority in its requests that have not ended. Any thread may call."""
        for each in tuple(self.running.values()):
            with suppress(ClosedError):  # the model was dropped meanwhile
                each.model.engine.set_priority(each.id, each.priority + priority)

    def stop(self) -> None:
        """Cancel all requests, and begin no further message."""
        with self._breaking:
            self._is_broken = True
        self._cancel_all()

    def close(self) -> None:
        """Cancel all requests, and end the thread and the connection, in which the thread may wait."""
        self.stop()
        self._channel.shut()
        self._outputs.put(None)
        self.thread.join()

    def _add(self, number: int, output: Output) -> None:
        """Add an output; runs on the engine's thread, because the stream's own waits in ``send`` if the client does not read."""
        self._put((number, output))

    def _put(self, item: tuple[int, Output] | LateAnswer) -> None:
        self._outputs.put(item)
        if self._outputs.qsize() > MAX_BACKLOG:
            self._break()

    def _break(self) -> None:
        """End the connection, so that a send that waits ends, and cancel all requests. A second call does nothing."""
        with self._breaking:
            if self._is_broken:  # after ``stop`` the channel may be closed, and its number may be another connection's
                return
            self._is_broken = True
            self._channel.shut()
        self._cancel_all()

    def _cancel_all(self) -> None:
        for each in tuple(self.running.values()):
            each.model.engine.cancel(each.id)

    def _run(self) -> None:
        while (first := self._outputs.get()) is not None:
            if isinstance(first, LateAnswer):
                self._send_answer(first)
                continue
            batch, is_ended = self._batch(first)
            for number, outputs in batch.items():
                self._send(number, outputs)
            if is_ended:
                break

    def _batch(self, first: tuple[int, Output]) -> tuple[dict[int, list[Output]], bool]:
        """Return what waits, by request, and whether the stream ends after it."""
        batch: dict[int, list[Output]] = {first[0]: [first[1]]}
        for _ in range(MAX_OUTPUTS):
            try:
                item = self._outputs.get_nowait()
            except queue.Empty:
                return batch, False
            if item is None:
                return batch, True
            if isinstance(item, LateAnswer):
                self._send_answer(item)
                continue
            batch.setdefault(item[0], []).append(item[1])
        return batch, False

    def _send_answer(self, answer: LateAnswer) -> None:
        if self._is_broken:
            return
        try:
            if answer.arrays:
                self._send_arrays(answer)
            else:
                with self._channel_lock:
                    self._channel.send(answer.message)
        except OSError:
            self._break()

    def _send_arrays(self, answer: LateAnswer) -> None:
        try:
            self._tensors.send(answer.message, answer.arrays)
        except BusyError as error:  # no shared memory is left for the client
            with self._channel_lock:
                self._channel.send(replace(refused(error), number=answer.message.number))

    def _send(self, number: int, outputs: list[Output]) -> None:
        self._count_tokens(number, outputs)
        flags = LAST if self._count_ends(number, outputs) else 0
        if self._is_broken:
            return
        body = {"outputs": [output_to_dict(output) for output in outputs]}
        try:
            with self._channel_lock:
                self._channel.send(Message(Kind.OUTPUT, number=number, flags=flags, body=body))
        except OSError:  # the client has gone; its connection's thread sees it too
            self._break()

    def _count_tokens(self, number: int, outputs: list[Output]) -> None:
        running = self.running[number]
        tokens = [each for each in outputs if isinstance(each, TokenOutput)]
        queued = 0.0
        if tokens and not running.has_begun:  # what is not its prompt's own calls was spent waiting for others
            running.has_begun = True
            queued = max(0.0, tokens[0].time - running.submitted - tokens[0].device_seconds)
        self._session.usage.add_calls(len(tokens), queued, 0)

    def _count_ends(self, number: int, outputs: list[Output]) -> bool:
        running = self.running[number]
        running.num_left -= sum(isinstance(output, Finished) for output in outputs)
        if running.num_left:
            return False
        del self.running[number]
        return True

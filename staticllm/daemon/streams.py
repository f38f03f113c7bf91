"""Sends the tokens of a client's requests over its connection, on a thread of its own, so that no engine waits for a client."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from staticllm.core import FinishReason
from staticllm.daemon.devices import Call
from staticllm.daemon.language_models import LanguageModel
from staticllm.daemon.session import Session
from staticllm.errors import BusyError
from staticllm.pipelines.engine.output_queue import (
    CompileTimes,
    Finished,
    Output,
    OutputQueue,
    TokenOutput,
    output_to_dict,
)
from staticllm.threads import start_thread
from staticllm.wire.channel import Channel
from staticllm.wire.messages import LAST, Kind, Message

MAX_RUNNING = 256
"""The most requests of one connection that have not ended."""
MAX_OUTPUTS = 512
"""The most outputs in one message."""
MAX_BACKLOG = 1 << 16
"""The most outputs that wait for a client to read; beyond them its requests are cancelled."""


class OutputStream:
    """The requests of one connection. ``submit`` and ``cancel`` run on the connection's thread."""

    def __init__(self, channel: Channel, lock: threading.Lock, session: Session) -> None:
        self._channel, self._channel_lock, self._session = channel, lock, session
        self._outputs: queue.SimpleQueue[tuple[int, Output] | None] = queue.SimpleQueue()
        self._running: dict[
            int, tuple[LanguageModel, int, int]
        ] = {}  # by the client's number: model, our id, answers left
        self._is_broken = False
        self._breaking = threading.Lock()
        self._thread = start_thread(self._run, "staticllm-stream")

    def submit(self, model: LanguageModel, number: int, values: Mapping[str, Any]) -> CompileTimes | None:
        """Submit a request of the client; its outputs follow under the client's own ``number``.

        Return what its grammar took to compile; None without one.

        Raises:
            BusyError: the client or the engine has too many requests.
            PromptError, ConfigError: the request is not one.
        """
        if len(self._running) >= MAX_RUNNING:
            raise BusyError(f"this program has {MAX_RUNNING} requests that have not ended: wait for one")
        if number in self._running:
            raise BusyError(f"request {number} has not ended")
        request = model.request_of(values)
        request = replace(request, priority=request.priority + self._session.priority)
        outputs = OutputQueue()
        outputs.add_listener(lambda output: self._add(number, output))
        self._running[number] = model, request.id, request.num_sequences
        try:
            model.engine.submit(request, outputs)
        except BaseException:
            del self._running[number]
            raise
        return outputs.compile_times

    def cancel(self, number: int, index: int | None, reason: FinishReason) -> None:
        """End a request, or one of its answers; unknown ones are ignored."""
        if (found := self._running.get(number)) is not None:
            model, id, _ = found
            model.engine.cancel(id, index, reason)

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
        self._thread.join()

    def _add(self, number: int, output: Output) -> None:
        """Add an output; runs on the engine's thread, because the stream's own waits in ``send`` if the client does not read."""
        self._outputs.put((number, output))
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
        for model, id, _ in list(self._running.values()):
            model.engine.cancel(id)

    def _run(self) -> None:
        while (first := self._outputs.get()) is not None:
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
            batch.setdefault(item[0], []).append(item[1])
        return batch, False

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
        model = self._running[number][0]
        for output in outputs:
            if isinstance(output, TokenOutput):
                self._session.count_call(model.id, Call(0.0, output.device_seconds), 0, "token of")

    def _count_ends(self, number: int, outputs: list[Output]) -> bool:
        model, id, left = self._running[number]
        left -= sum(isinstance(output, Finished) for output in outputs)
        if left:
            self._running[number] = model, id, left
            return False
        del self._running[number]
        return True

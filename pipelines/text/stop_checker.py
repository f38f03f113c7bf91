"""Ends answers at their stop strings on a thread of its own, even while nothing reads them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

from staticllm.core import FinishReason
from staticllm.errors import pipeline_closed
from staticllm.system.threads import LazyThread

from ..engine.client import EngineClient
from ..engine.request import EngineRequest, Finished, Output, OutputQueue, TokenOutput
from .detokenizer import IncrementalDetokenizer


class StopChecker:
    """Decodes the answers of requests with stop strings on a thread of its own, and cancels each at its first stop string.

    The engine itself never decodes text. It may compute a few more tokens before it sees the cancellation; the reader cuts
    the text at the stop string in any case. The thread starts with the first such request and ends with ``close``.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._outputs: queue.SimpleQueue[tuple[int, Output] | None] = queue.SimpleQueue()
        self._watched: dict[int, dict[int, IncrementalDetokenizer]] = {}  # by request and answer
        self._lock = threading.Lock()
        self._thread = LazyThread("staticllm-stop-checker")
        self._is_closed = False
        self._pid = os.getpid()

    def watch(
        self, request: EngineRequest, outputs: OutputQueue, detokenizer: Callable[[], IncrementalDetokenizer]
    ) -> None:
        """Check the answers of ``request``, each with a detokenizer of its own; to be called before it is submitted.

        Raises:
            ClosedError: ``close`` was called.
            StaticLLMError: no thread can be started.
        """
        with self._lock:
            if self._is_closed:
                raise pipeline_closed()
            self._thread.start(self._run)
            self._watched[request.id] = {index: detokenizer() for index in range(request.num_sequences)}
        outputs.add_listener(lambda output: self._outputs.put((request.id, output)))

    def forget(self, request: int) -> None:
        """Stop checking a request that the engine refused."""
        self._watched.pop(request, None)

    def close(self) -> None:
        """End the thread without decoding what is left. A second call does nothing, and neither does one in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._is_closed = True
        self._outputs.put(None)
        self._thread.join()
        self._watched.clear()

    def _run(self) -> None:
        while (item := self._outputs.get()) is not None and not self._is_closed:
            self._check(*item)

    def _check(self, request: int, output: Output) -> None:
        answers = self._watched.get(request, {})
        detokenizer = answers.get(output.index)
        if detokenizer is None:
            return
        is_over = isinstance(output, Finished)
        if isinstance(output, TokenOutput):
            try:
                detokenizer.push(output.id)
                is_over = detokenizer.is_stopped
            except BaseException:  # the reader meets the same error and raises it
                is_over = True
            if detokenizer.is_stopped:
                self._client.cancel(request, output.index, FinishReason.STOP)
        if is_over:
            del answers[output.index]
            if not answers:
                self.forget(request)

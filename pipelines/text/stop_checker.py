"""Ends answers at their stop strings on a thread of its own, even while nothing reads them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection

from staticllm.core import FinishReason
from staticllm.pipelines.engine.client import EngineClient
from staticllm.pipelines.engine.output_queue import Finished, Output, OutputQueue
from staticllm.pipelines.text.detokenizer import IncrementalDetokenizer
from staticllm.threads import start_thread

Answer = tuple[int, int]
"""The id of a request and the index of one of its answers."""


class StopChecker:
    """Decodes the answers of requests with stop strings on a thread of its own, and cancels each at its first stop string.

    The engine itself never decodes text. It may compute a few more tokens before it sees the cancellation; the reader cuts
    the text at the stop string in any case. The thread starts with the first such request and ends with ``close``.
    """

    def __init__(self, client: EngineClient, decode: Callable[[list[int]], str]) -> None:
        self._client, self._decode = client, decode
        self._outputs: queue.SimpleQueue[tuple[int, Output] | None] = queue.SimpleQueue()
        self._stop_strings: dict[int, Collection[str]] = {}
        self._detokenizers: dict[Answer, IncrementalDetokenizer] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, request: int, outputs: OutputQueue, stop_strings: Collection[str]) -> None:
        """Check the answers of ``request``; to be called before it is submitted.

        Raises:
            StaticLLMError: no thread can be started.
        """
        with self._lock:
            if self._thread is None:
                self._thread = start_thread(self._run, "staticllm-stop-checker")
        self._stop_strings[request] = stop_strings
        outputs.add_listener(lambda output: self._outputs.put((request, output)))

    def close(self) -> None:
        """End the thread. Closing again does nothing."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._outputs.put(None)
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        while (item := self._outputs.get()) is not None:
            self._check(*item)

    def _check(self, request: int, output: Output) -> None:
        answer = (request, output.index)
        if isinstance(output, Finished):
            self._detokenizers.pop(answer, None)
            if not any(other == request for other, _ in self._detokenizers):
                self._stop_strings.pop(request, None)
            return
        if request not in self._stop_strings:
            return
        detokenizer = self._detokenizers.get(answer)
        if detokenizer is None:
            detokenizer = IncrementalDetokenizer(self._decode, self._stop_strings[request])
            self._detokenizers[answer] = detokenizer
        if detokenizer.is_stopped:
            return
        try:
            detokenizer.push(output.id)
        except Exception:  # the reader meets the same error and raises it
            self._client.cancel(request, output.index, FinishReason.ERROR)
            return
        if detokenizer.is_stopped:
            self._client.cancel(request, output.index, FinishReason.STOP)

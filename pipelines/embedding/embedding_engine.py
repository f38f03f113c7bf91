"""Runs a queue of texts on one device with a thread of its own."""

from __future__ import annotations

import os
import threading

from staticllm.pipelines.embedding.embedding_queue import EmbeddingQueue
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner
from staticllm.threads import start_thread


class EmbeddingEngine:
    """Owns a device on which only one encoder runs. Its thread starts with the first text."""

    def __init__(self, runner: EncoderRunner, max_waiting: int) -> None:
        self.queue = EmbeddingQueue(runner, max_waiting, self._notify)
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._pid = os.getpid()

    def close(self) -> None:
        """End the thread after its current call; texts that wait end with a ``ClosedError``. A second call does nothing."""
        if os.getpid() != self._pid:  # a forked child: thread and locks belong to the parent
            return
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.queue.close()

    def _notify(self) -> None:
        with self._wake:
            if self._thread is None and not self._is_closing:
                self._thread = start_thread(self._loop, "staticllm-embedding")
            self._wake.notify()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not self._is_closing and not self.queue.num_waiting:
                    self._wake.wait()
                if self._is_closing:
                    break
            self.queue.run_next()

"""How tokens leave an engine: plain values in one queue per request, so that they can cross a process."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from staticllm.core import FinishReason


@dataclass(frozen=True)
class TokenOutput:
    """One chosen token of answer ``index``.

    ``logprob`` is its log-probability (0.0 unless asked for), ``time`` the moment of the choice (``time.perf_counter``), and
    ``sampling_seconds`` what the choice took.
    """

    id: int
    logprob: float
    time: float
    sampling_seconds: float
    index: int = 0


@dataclass(frozen=True)
class Usage:
    """What a request cost: prompt tokens that the prefix cache had, and seconds of the device calls that it took part in."""

    num_cached: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The last output of answer ``index``. ``error`` is the exception that ended it, if one did."""

    reason: FinishReason
    error: BaseException | None = None
    index: int = 0
    usage: Usage = Usage()


Output = TokenOutput | Finished
Listener = Callable[[Output], None]


class OutputQueue:
    """From the engine's thread to one reader. Listeners are called with every output, on the thread that puts it."""

    def __init__(self) -> None:
        self._outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self._listeners: tuple[Listener, ...] = ()

    def put(self, output: Output) -> None:
        """Engine's thread: add an output and wake the reader."""
        self._outputs.put(output)
        for listener in self._listeners:
            listener(output)

    def get(self, timeout: float | None = None) -> Output | None:
        """The next output; None if there is none within ``timeout`` seconds."""
        try:
            return self._outputs.get(timeout=timeout) if timeout != 0 else self._outputs.get_nowait()
        except queue.Empty:
            return None

    def add_listener(self, listener: Listener) -> None:
        self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: Listener) -> None:
        self._listeners = tuple(other for other in self._listeners if other is not listener)

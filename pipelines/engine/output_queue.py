"""Carries tokens from the engine to a reader as plain values, which can be sent to another process."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from staticllm.core import FinishReason
from staticllm.errors import from_wire, to_wire


@dataclass(frozen=True)
class CompileTimes:
    """What the grammar of a request took to compile, and the preparation of its compiler, in seconds."""

    seconds: float
    init_seconds: float
    compiler: str = "llguidance"


@dataclass(frozen=True)
class TokenOutput:
    """One chosen token of answer ``index``.

    ``logprob`` is its log-probability (as in ``Choice``), ``time`` the moment of the choice (``time.perf_counter``), and
    ``sampling_seconds`` the duration of the choice. ``device_seconds`` is the time of the device calls since the previous token
    (for the first one, those of the prompt); ``num_cached`` is the number of prompt tokens that the prefix cache had.
    ``num_drafted`` tokens of drafts were checked since the previous token, and ``num_accepted`` of them accepted. The draft model
    took ``draft_seconds`` for them.
    """

    id: int
    logprob: float
    time: float
    sampling_seconds: float
    index: int = 0
    device_seconds: float = 0.0
    num_cached: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    draft_seconds: float = 0.0


@dataclass(frozen=True)
class Finished:
    """The last output of answer ``index``. ``error`` is the exception that ended it, if one did."""

    reason: FinishReason
    error: BaseException | None = None
    index: int = 0


Output = TokenOutput | Finished


def output_to_dict(output: Output) -> dict[str, Any]:
    """Return an output as a dict of JSON types."""
    if isinstance(output, TokenOutput):
        return asdict(output)
    error = None if output.error is None else to_wire(output.error)
    return {"reason": str(output.reason), "error": error, "index": output.index}


def output_from_dict(values: Mapping[str, Any]) -> Output:
    """Return the output that ``output_to_dict`` described. An error of an unknown class is of the nearest known base.

    Raises:
        TypeError, KeyError, ValueError: it is not one.
    """
    if "id" in values:
        return TokenOutput(**values)
    error = None if values["error"] is None else from_wire(values["error"])
    return Finished(FinishReason(values["reason"]), error, values["index"])


Listener = Callable[[Output], None]


class OutputQueue:
    """Passes outputs from the engine's thread to one reader. Listeners receive every output on the engine's thread."""

    def __init__(self) -> None:
        self._outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self._listeners: tuple[Listener, ...] = ()
        self.compile_times: CompileTimes | None = None  # of the request's grammar; set when it is submitted

    def put(self, output: Output) -> None:
        """Add an output, wake the reader and call the listeners. Runs on the engine's thread."""
        self._outputs.put(output)
        for listener in self._listeners:
            listener(output)

    def get(self, timeout: float | None = None) -> Output | None:
        """Return the next output; None if there is none within ``timeout`` seconds. Runs on the reader's thread."""
        try:
            return self._outputs.get(timeout=timeout) if timeout != 0 else self._outputs.get_nowait()
        except queue.Empty:
            return None

    def add_listener(self, listener: Listener) -> None:
        """Call ``listener`` with every output from now on."""
        self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: Listener) -> None:
        """Stop calling ``listener``."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)

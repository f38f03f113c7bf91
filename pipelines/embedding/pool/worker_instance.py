"""The parent's side of an instance in a worker process: starts the process, sends texts to it, and restarts it if it ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from staticllm.children.answers import error_of
from staticllm.children.child import Child, ChildLostError, python_command
from staticllm.errors import ConfigError, DeviceError
from staticllm.wire.messages import Kind, Message

from ..encoder_kind import EncoderChoices
from ..packing.encoder_buffers import Vectors
from ..packing.tokenized_text import TokenizedText
from ..queue.loads import Costs
from .instances import (
    MAX_TEXTS,
    EncoderInfo,
    WorkerLostError,
    decode_costs,
    encode_texts,
)

START_SECONDS = 600.0
"""The longest time that loading the model may take in a worker process."""
END_SECONDS = 5.0
"""Grace period for a worker process that was told to end, in seconds."""
_MODULE = "staticllm.pipelines.embedding.pool.worker_process"


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker process loads, and on which logical processors."""

    name: str
    directory: Path
    device: str
    cores: tuple[int, ...]
    """Empty for all."""
    choices: EncoderChoices

    def to_dict(self) -> dict[str, object]:
        """Return the spec as plain JSON.

        Raises:
            ConfigError: a property is not a str, a number or a bool.
        """
        for name, value in (self.choices.properties or {}).items():
            if not isinstance(value, (str, int, float, bool)):
                raise ConfigError(
                    f"{name}={value!r}: {self.name} runs in a process of its own, which takes str, numbers and bool only"
                )
        choices = asdict(self.choices)
        directory = str(self.directory.resolve())
        return {"directory": directory, "device": self.device, "cores": list(self.cores), "choices": choices}


def can_start_workers() -> bool:
    """Return whether worker processes can be started: not in an application that is frozen into one program."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def worker_command() -> list[str]:
    """Return the command of a worker process: this interpreter, with the same places of modules."""
    return python_command(_MODULE)


class WorkerInstance:
    """An encoder in a separate process. The constructor returns immediately; ``wait_ready`` waits until the model is loaded.

    ``command`` starts the process; tests give another one.
    """

    device_seconds = None

    def __init__(self, spec: WorkerSpec, command: Callable[[], Sequence[str]] = worker_command) -> None:
        self.name = spec.name
        self.info = EncoderInfo(0, 0, None, True)
        self._body = spec.to_dict()
        self._command = command
        self._costs: Costs = {}
        self._is_closed = False
        self._lock = threading.Lock()  # between a start, an interrupt and a close
        self._child = self._start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def costs(self) -> Costs:
        return self._costs

    def wait_ready(self) -> None:
        """Wait until the process has loaded the model.

        Raises:
            StaticLLMError: it could not; the error is that of ``load_encoder``.
        """
        try:
            answer = self._ask(Message(Kind.MODEL, body=self._body), START_SECONDS)
        except BaseException:
            self._child.end(END_SECONDS)
            raise
        self.info = EncoderInfo(**answer.body["info"])
        self._costs = decode_costs(answer.body["costs"])

    def embed(self, texts: Sequence[TokenizedText], priority: int = 0) -> Vectors:
        parts = [self._embed(texts[start : start + MAX_TEXTS]) for start in range(0, len(texts), MAX_TEXTS)]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _embed(self, texts: Sequence[TokenizedText]) -> Vectors:
        body, payload = encode_texts(texts)
        answer = self._ask(Message(Kind.INFER, body=body, payload=payload))
        self._costs = decode_costs(answer.body["costs"])
        found = np.frombuffer(answer.payload, "<f4")
        if found.size != len(texts) * self.info.width:
            self.interrupt()
            raise WorkerLostError(f"the worker process of {self.name} answered {found.size} values: it was ended")
        return found.reshape(len(texts), self.info.width).astype(np.float32)

    def interrupt(self) -> bool:
        """Kill the process; a call that waits for it raises ``WorkerLostError``."""
        with self._lock:
            self._child.kill()
        return True

    def recover(self) -> None:
        """Restart the process if it ended; otherwise test it with a text of one token.

        Raises:
            StaticLLMError: it cannot load the model any more, or the device fails.
        """
        if self._child.is_usable:
            try:
                self.embed([TokenizedText(np.zeros(1, np.int64))])
                return
            except WorkerLostError:
                pass
        self._child.end(END_SECONDS)
        with self._lock:
            if self._is_closed:
                raise WorkerLostError(f"{self.name} was closed")
            self._child = self._start()
        self.wait_ready()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._child.end(END_SECONDS)

    def _start(self) -> Child:
        try:
            return Child(self._command(), has_pipes=True)
        except OSError as error:
            raise DeviceError(f"the worker process of {self.name} cannot be started: {error}") from error

    def _ask(self, message: Message, seconds: float | None = None) -> Message:
        """Send a message and return the answer. Raises the worker's error, or ``WorkerLostError`` if it ended."""
        try:
            answer = self._child.ask(message, seconds)
            error = error_of(answer, f"{self.name}: ")
        except (ChildLostError, ValueError) as lost:
            self._child.end(END_SECONDS)
            raise WorkerLostError(f"the worker process of {self.name} ended {lost}") from lost
        except TimeoutError:
            raise WorkerLostError(f"the worker process of {self.name} was ended after {seconds:g} s") from None
        if error is not None:
            raise error
        return answer

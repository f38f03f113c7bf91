"""An instance in a worker process: the parent's side, which starts it, sends texts to it, and starts it again if it ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from staticllm.errors import ConfigError, DeviceError, from_wire
from staticllm.pipelines.embedding.encoder_kind import EncoderChoices
from staticllm.pipelines.embedding.packing.encoder_buffers import Vectors
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.pipelines.embedding.pool.frames import Frame, FrameError, read_frame, write_frame
from staticllm.pipelines.embedding.pool.instances import (
    MAX_TEXTS,
    Costs,
    EncoderInfo,
    WorkerLostError,
    decode_costs,
    encode_texts,
)

START_SECONDS = 600.0
"""The longest time that loading the model may take in a worker process."""
END_SECONDS = 5.0
"""The time that a worker process has for its end before it is killed."""
_CODE = "import sys; sys.path[:] = {path!r}; from {module} import main; main()"
_MODULE = "staticllm.pipelines.embedding.pool.worker_process"


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker process loads, and on which logical processors; ``cores`` is empty for all."""

    name: str
    directory: Path
    device: str
    cores: tuple[int, ...]
    choices: EncoderChoices

    def header(self) -> dict[str, object]:
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
    return [sys.executable, "-c", _CODE.format(path=sys.path, module=_MODULE)]


class WorkerInstance:
    """An encoder in a process of its own. Its constructor returns at once; ``wait_ready`` waits until the model is loaded.

    ``command`` starts the process; tests give another one.
    """

    def __init__(self, spec: WorkerSpec, command: Callable[[], Sequence[str]] = worker_command) -> None:
        self.name = spec.name
        self.info = EncoderInfo(0, 0, None, True)
        self._spec, self._header, self._command = spec, spec.header(), command
        self._costs: Costs = {}
        self._is_closed = False
        self._lock = threading.Lock()  # between a start, an interrupt and a close
        self._process = self._start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def costs(self) -> Costs:
        """Seconds per call of each variant, as the process reported them last."""
        return self._costs

    def wait_ready(self) -> None:
        """Wait until the process has loaded the model.

        Raises:
            StaticLLMError: it could not; the error is that of ``load_encoder``.
        """
        limit = threading.Timer(START_SECONDS, self.interrupt)
        limit.daemon = True
        limit.start()
        try:
            header = self._ask(self._header, b"").header
        except BaseException:
            self._end(self._process)
            raise
        finally:
            limit.cancel()
        self.info = EncoderInfo(**header["info"])
        self._costs = decode_costs(header["costs"])

    def embed(self, texts: Sequence[TokenizedText]) -> Vectors:
        """Return the vectors ``[n, width]`` of the texts.

        Raises:
            WorkerLostError: the process ended.
            DeviceError: the device failed; the process goes on.
        """
        parts = [self._embed(texts[start : start + MAX_TEXTS]) for start in range(0, len(texts), MAX_TEXTS)]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _embed(self, texts: Sequence[TokenizedText]) -> Vectors:
        answer = self._ask(*encode_texts(texts))
        self._costs = decode_costs(answer.header["costs"])
        found = np.frombuffer(answer.body, "<f4")
        if found.size != len(texts) * self.info.width:
            self.interrupt()
            raise WorkerLostError(f"the worker process of {self.name} answered {found.size} values: it was ended")
        return found.reshape(len(texts), self.info.width).astype(np.float32)

    def interrupt(self) -> bool:
        """Kill the process; a call that waits for it raises ``WorkerLostError``."""
        with self._lock:
            self._process.kill()
        return True

    def recover(self) -> None:
        """Start the process again if it ended; one that goes on is asked for a text of one token.

        Raises:
            StaticLLMError: it cannot load the model any more, or the device fails.
        """
        if self._process.poll() is None and self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self.embed([TokenizedText(np.zeros(1, np.int64))])
                return
            except WorkerLostError:
                pass
        self._end(self._process)
        with self._lock:
            if self._is_closed:
                raise WorkerLostError(f"{self.name} was closed")
            self._process = self._start()
        self.wait_ready()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._is_closed = True
        self._end(self._process)

    def _start(self) -> subprocess.Popen[bytes]:
        group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        try:
            return subprocess.Popen(
                list(self._command()), stdin=subprocess.PIPE, stdout=subprocess.PIPE, creationflags=group
            )
        except OSError as error:
            raise DeviceError(f"the worker process of {self.name} cannot be started: {error}") from error

    def _ask(self, header: dict[str, object], body: bytes) -> Frame:
        """Send a frame, and return the answer."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frame(process.stdin, header, body)
            answer = read_frame(process.stdout)
        except (FrameError, OSError, ValueError) as error:  # ValueError: closed meanwhile
            raise self._lost(process, str(error)) from error
        if answer is None:
            raise self._lost(process, "it closed its pipe")
        if "error" in answer.header:
            try:
                reported = from_wire(answer.header["error"], f"{self.name}: ")
            except ValueError as damaged:
                raise self._lost(process, str(damaged)) from damaged
            raise reported
        return answer

    def _lost(self, process: subprocess.Popen[bytes], reason: str) -> WorkerLostError:
        """End the process that cannot be used any more, and return the error that says how it ended."""
        self._end(process)
        code = process.returncode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with code {code}, {reason}"
        return WorkerLostError(f"the worker process of {self.name} ended {how}")

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Close the pipes, and wait until the process has ended; it is killed if it takes too long."""
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not written is lost with the process
                    pipe.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        except BaseException:
            process.kill()
            raise

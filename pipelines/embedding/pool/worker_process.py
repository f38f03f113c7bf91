"""A worker process: one instance of an encoder, with its threads bound to its own cores before OpenVINO is loaded.

It reads frames from its standard input and writes the answers to its standard output, whose place stderr takes for everything
that others print. It ends when its standard input does, also in the middle of a call: its parent has closed it, or is gone.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from staticllm.errors import as_ours, to_wire
from staticllm.pipelines.embedding.pool.frames import Frame, FrameError, read_frame, write_frame
from staticllm.pipelines.embedding.windve.affinity import bind_process

if TYPE_CHECKING:
    from staticllm.pipelines.embedding.encoder_runner import EncoderRunner
    from staticllm.pipelines.embedding.load import LoadedEncoder


def main() -> None:
    """Load the model that the first frame names, then embed the texts of each further frame."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of a terminal; the parent closes this one
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _keep_to_itself(answers)
    spec = read_frame(sys.stdin.buffer)
    if spec is None:
        return
    frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    try:
        if spec.header["cores"]:
            bind_process(spec.header["cores"])
        threading.Thread(target=_read, args=(sys.stdin.buffer, frames), name="frames", daemon=True).start()
        loaded = _load(spec.header)
    except Exception as error:
        write_frame(answers, _problem(error))
        os._exit(1)  # the thread that reads would keep the interpreter from its end
    from staticllm.pipelines.embedding.pool.instances import EncoderInfo, costs_of, encode_costs

    info = asdict(EncoderInfo.of(loaded))
    write_frame(answers, {"info": info, "costs": encode_costs(costs_of(loaded.runner))})
    while True:
        header, body = _answer(loaded.runner, frames.get())
        write_frame(answers, header, body)


def _keep_to_itself(answers: BinaryIO) -> None:
    """Close the pipes in every process that is forked from this one: if this one is killed, its parent must see their end.

    OpenVINO's telemetry forks when it is imported, on a thread. The parent has reported the start, so a worker does not.
    """
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    if hasattr(os, "register_at_fork"):
        pipes = answers.fileno(), 0
        for pipe in pipes:
            os.register_at_fork(after_in_child=partial(os.close, pipe))


def _read(stream: BinaryIO, frames: queue.SimpleQueue[Frame]) -> None:
    try:
        while (frame := read_frame(stream)) is not None:
            frames.put(frame)
    except (FrameError, OSError):
        pass
    finally:
        os._exit(0)


def _load(spec: Mapping[str, Any]) -> LoadedEncoder:
    """Load the encoder. The import loads OpenVINO, which takes over the cores to which the process is bound by now."""
    from staticllm.pipelines.embedding.encoder_kind import EncoderChoices  # loads OpenVINO: after ``bind_process``
    from staticllm.pipelines.embedding.load import load_encoder

    choices = dict(spec["choices"])
    if choices["sizes"] is not None:
        choices["sizes"] = [(int(batch), int(rows)) for batch, rows in choices["sizes"]]
    choices["score_tokens"] = tuple(choices["score_tokens"])
    return load_encoder(Path(spec["directory"]), spec["device"], EncoderChoices(**choices))


def _answer(runner: EncoderRunner, frame: Frame) -> tuple[dict[str, Any], bytes]:
    from staticllm.pipelines.embedding.pool.instances import (
        costs_of,
        decode_texts,
        embed_texts,
        encode_costs,
    )

    try:
        vectors = embed_texts(runner, list(decode_texts(frame.header, frame.body)))
    except Exception as error:
        return _problem(error), b""
    return {"costs": encode_costs(costs_of(runner))}, vectors.astype("<f4").tobytes()


def _problem(error: Exception) -> dict[str, Any]:
    return {"error": to_wire(as_ours(error))}

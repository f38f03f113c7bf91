"""A worker process: one instance of an encoder, with threads pinned to its cores before OpenVINO is loaded.

The process reads messages from standard input and writes the answers to standard output; all other output goes to standard
error. It exits when its standard input closes, even in the middle of a call, because its parent closed it or exited.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from staticllm.children.answers import failed
from staticllm.children.child import take_pipes
from staticllm.errors import as_ours
from staticllm.wire.messages import Kind, Message, ProtocolError, read_message, write_message

from ..windve.affinity import bind_process

if TYPE_CHECKING:
    from ..encoder_job import LoadedEncoder
    from ..encoder_runner import EncoderRunner


def main() -> None:
    """Load the model that the first message names, then embed the texts of each further message."""
    questions, answers = take_pipes()
    spec = read_message(questions)
    if spec is None:
        return
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    try:
        if spec.body["cores"]:
            bind_process(spec.body["cores"])
        threading.Thread(target=_read, args=(questions, messages), name="questions", daemon=True).start()
        loaded = _load(spec.body)
    except Exception as error:
        write_message(answers, failed(as_ours(error)))
        os._exit(1)  # the thread that reads would keep the interpreter from its end
    from .instances import EncoderInfo, costs_of, encode_costs

    info = asdict(EncoderInfo.of(loaded))
    write_message(answers, Message(Kind.OK, body={"info": info, "costs": encode_costs(costs_of(loaded.runner))}))
    while True:
        write_message(answers, _answer(loaded.runner, messages.get()))


def _read(questions: BinaryIO, messages: queue.SimpleQueue[Message]) -> None:
    try:
        while (message := read_message(questions)) is not None:
            messages.put(message)
    except (ProtocolError, OSError):
        pass
    finally:
        os._exit(0)


def _load(spec: Mapping[str, Any]) -> LoadedEncoder:
    """Load the encoder. The import loads OpenVINO, which takes over the cores to which the process is bound by now."""
    from ..encoder_job import load_encoder
    from ..encoder_kind import EncoderChoices  # loads OpenVINO: after ``bind_process``

    choices = dict(spec["choices"])
    if choices["sizes"] is not None:
        choices["sizes"] = [(int(batch), int(rows)) for batch, rows in choices["sizes"]]
    choices["score_tokens"] = tuple(choices["score_tokens"])
    return load_encoder(Path(spec["directory"]), spec["device"], EncoderChoices(**choices))


def _answer(runner: EncoderRunner, message: Message) -> Message:
    from .instances import costs_of, decode_texts, embed_texts, encode_costs

    try:
        vectors = embed_texts(runner, list(decode_texts(message.body, bytes(message.payload))))
    except Exception as error:
        return failed(as_ours(error))
    body = {"costs": encode_costs(costs_of(runner))}
    return Message(Kind.DONE, body=body, payload=vectors.astype("<f4").tobytes())

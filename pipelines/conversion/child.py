"""The process that converts a GGUF file, which ``staticllm.sources.converted`` starts."""

from __future__ import annotations

from pathlib import Path

from staticllm.children.answers import failed
from staticllm.children.child import take_pipes
from staticllm.errors import ModelError, StaticLLMError, last_line
from staticllm.pipelines.conversion.gguf_model import convert
from staticllm.wire.messages import Kind, Message, read_message, write_message


def main() -> None:
    questions, answers = take_pipes()
    message = read_message(questions)
    if message is None:
        return
    path = Path(message.body["path"])
    try:
        convert(path, Path(message.body["target"]))
    except StaticLLMError as error:
        write_message(answers, failed(error))
    except MemoryError:
        write_message(answers, failed(ModelError(f"{str(path)!r} does not fit into memory: close other programs")))
    except Exception as error:
        write_message(answers, failed(ModelError(f"{str(path)!r} cannot be converted: {last_line(error)}")))
    else:
        write_message(answers, Message(Kind.OK))

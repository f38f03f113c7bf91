"""The process that converts a GGUF file, which ``staticllm.model_files.converted`` starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from staticllm.children.answers import answer_all
from staticllm.errors import ModelError, last_line, quoted
from staticllm.model_files.converted import NOTES
from staticllm.system.file_lock import acquire
from staticllm.system.posix import end_with_parent

from .gguf_model import convert


def _answer(body: Mapping[str, Any]) -> dict[str, Any]:
    with acquire(Path(body["lock"])):
        return {NOTES: convert(Path(body["path"]), Path(body["target"]))}


def _failure(error: Exception, body: Mapping[str, Any]) -> ModelError:
    if isinstance(error, MemoryError):
        return ModelError(f"{quoted(body['path'])} does not fit into memory: close other programs")
    return ModelError(f"{quoted(body['path'])} cannot be converted: {last_line(error)}")


def main() -> None:
    end_with_parent()
    answer_all(_answer, _failure)

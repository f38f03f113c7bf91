"""Reads the texts of a command in parts: its arguments, or plain or JSON lines of a file or of stdin."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click

from staticllm.cli.options import as_text, options_of, value
from staticllm.errors import PromptError, StaticLLMError

FIELD = "text"
"""The field of JSON lines that holds the text, unless ``--field`` names another."""
JSON_LINES = (".jsonl", ".ndjson")
MAX_LINE_BYTES = 1 << 26
TEXT_ERROR = re.compile(r"text (\d+):? (.*)", re.DOTALL)
BATCH_TEXTS, BATCH_CHARS = 1024, 1 << 22
"""Size of a batch: more texts or characters hardly fill a device's calls better."""


@dataclass(frozen=True)
class TextEntry:
    """One text, the number of its line from 1, and the fields of the JSON object that it came in."""

    text: str
    line: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class TextBatch:
    """Texts that follow one another, and the share of the whole input that ends with them; None if its size is unknown."""

    entries: Sequence[TextEntry]
    share: float | None

    @property
    def texts(self) -> list[str]:
        return [entry.text for entry in self.entries]

    def line_of(self, error: StaticLLMError) -> tuple[int, str] | None:
        """Return the line of the text that an error is about, and what it says about it; None if it is about none.

        The library begins such a message with the index of the text in the call.
        """
        found = TEXT_ERROR.match(str(error))
        index = int(found[1]) if found else len(self.entries)
        return (self.entries[index].line, found[2]) if found and index < len(self.entries) else None


text_options = options_of(
    click.argument("texts", nargs=-1),
    value("-f --file", click.Path(), "A file with one text per line; - is stdin."),
    value("--field", None, f"Read JSON lines; the text is in this field.  [{FIELD}]", metavar="NAME"),
)
"""``[TEXTS]...``, ``--file`` and ``--field``."""


class TextInput:
    """Where texts come from: arguments, or the lines of a file or of stdin. ``name`` is for messages."""

    def __init__(self, arguments: Sequence[str], path: str | None, field: str | None) -> None:
        """Choose the input.

        Raises:
            UsageError: there is none, or there are two.
            PromptError: an argument is not text, or the file is a folder.
        """
        if arguments and path is not None:
            raise click.UsageError("texts are given twice, as arguments and with --file: leave one out")
        if arguments and field is not None:
            raise click.UsageError("--field is for JSON lines from --file or stdin: leave it or the arguments out")
        if not arguments and path is None and (sys.stdin is None or sys.stdin.isatty()):
            raise click.UsageError("there is no text: give TEXTS, --file, or pipe lines into standard input")
        self._arguments = [as_text(text, f"text {number}") for number, text in enumerate(arguments, 1)]
        self._path = None if path is None or path == "-" else Path(path)
        if self._path is not None and self._path.is_dir():
            raise PromptError(f"{path}: is a folder: give a file with one text per line, or JSON lines")
        is_json = self._path is not None and self._path.suffix.lower() in JSON_LINES
        self._field = field if field is not None else FIELD if is_json else None
        self.name = "the arguments" if arguments else "standard input" if self._path is None else str(path)

    @contextmanager
    def batches(self) -> Iterator[Iterator[TextBatch]]:
        """Open the input while a block runs, and give its texts in order, in batches.

        Raises:
            PromptError: there is no text at all, or a line is not what it must be.
            OSError: the file cannot be read.
        """
        if self._arguments:
            yield _batches((TextEntry(text, i, {}) for i, text in enumerate(self._arguments, 1)), lambda: 1.0)
        elif self._path is None:
            if sys.stdin is None:
                raise click.UsageError("standard input is closed: give TEXTS or --file")
            yield self._checked(_batches(self._entries(sys.stdin.buffer), lambda: None))
        else:
            with self._path.open("rb") as file:
                size = self._path.stat().st_size if self._path.is_file() else 0
                yield self._checked(_batches(self._entries(file), lambda: file.tell() / size if size else None))

    def located(self, error: StaticLLMError, batch: TextBatch) -> StaticLLMError:
        """Return an error of a batch with the line of its text in place of the index; others are returned as they are."""
        found = batch.line_of(error)
        return error if found is None else StaticLLMError(f"{self._place(found[0])}: {found[1]}")

    def _checked(self, batches: Iterator[TextBatch]) -> Iterator[TextBatch]:
        first = next(batches, None)
        if first is None:
            raise PromptError(f"{self.name} is empty: give one text per line, or JSON lines")
        yield first
        yield from batches

    def _entries(self, stream: BinaryIO) -> Iterator[TextEntry]:
        number = 0
        while data := self._line(stream, number + 1):
            number += 1
            if len(data) > MAX_LINE_BYTES:
                raise self._error(number, f"has more than {MAX_LINE_BYTES} bytes: break it into several")
            line = self._decoded(data, number)
            if self._field is None:
                yield TextEntry(line, number, {})
            elif line.strip():
                yield self._entry(line, number, self._field)

    def _line(self, stream: BinaryIO, number: int) -> bytes:
        try:
            return stream.readline(MAX_LINE_BYTES + 1)
        except OSError as error:
            raise self._error(number, f"cannot be read: {error.strerror or error}") from error

    def _decoded(self, data: bytes, number: int) -> str:
        try:
            line = data.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            place = f"byte 0x{data[error.start]:02x} at {error.start}"
            raise self._error(number, f"is not text in UTF-8 ({place}): convert it first") from None
        if "\0" in line:
            raise self._error(number, "is binary (it has a zero byte): give text in UTF-8")
        return line.rstrip("\n").removesuffix("\r")

    def _entry(self, line: str, number: int, field: str) -> TextEntry:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._error(number, f"is not JSON ({error}): leave out --field for plain lines") from None
        if not isinstance(found, dict):
            raise self._error(number, f"holds a {type(found).__name__}: must be an object with the field {field!r}")
        if field not in found:
            names = ", ".join(map(repr, list(found)[:5])) or "none"
            raise self._error(number, f"has no field {field!r} (it has {names}): name the text's with --field")
        text = found[field]
        if not isinstance(text, str):
            raise self._error(number, f"field {field!r} holds a {type(text).__name__}: must be a string")
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise self._error(number, f"field {field!r} holds half a character (a lone surrogate): write it whole")
        return TextEntry(text, number, found)

    def _error(self, number: int, text: str) -> PromptError:
        return PromptError(f"{self._place(number)}: {text}")

    def _place(self, number: int) -> str:
        return f"{self.name}, {'text' if self._arguments else 'line'} {number}"


def _batches(entries: Iterator[TextEntry], share: Callable[[], float | None]) -> Iterator[TextBatch]:
    held: list[TextEntry] = []
    num_chars = 0
    for entry in entries:
        held.append(entry)
        num_chars += len(entry.text)
        if len(held) == BATCH_TEXTS or num_chars >= BATCH_CHARS:
            yield TextBatch(held, share())
            held = []
            num_chars = 0
    if held:
        yield TextBatch(held, share())

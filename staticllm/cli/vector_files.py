"""Writes vectors as NPY or JSON lines, batch by batch, to a file that appears only when it is whole, or lines to stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np
from numpy.typing import NDArray

from staticllm.cli.texts import TextEntry
from staticllm.errors import ConfigError, quoted
from staticllm.system.files import whole_file

SUFFIXES = {".npy": "npy", ".jsonl": "jsonl", ".ndjson": "jsonl"}
EMBEDDING = "embedding"
"""The field of JSON lines that holds the vector."""

Write = Callable[[Sequence[TextEntry], NDArray[np.float32]], None]
"""Writes the vectors ``[n, width]`` of ``n`` texts; called for one batch after another."""


def chosen_format(output: str | None, named: str | None) -> str:
    """Return the format that is named, or that the file's suffix says; JSON lines for stdout.

    Raises:
        UsageError: neither says it, or an array would go to stdout, or to something that is no file.
    """
    found = named or ("jsonl" if output is None else SUFFIXES.get(Path(output).suffix.lower()))
    if found is None:
        raise click.UsageError(
            f"--output {quoted(output)}: the suffix says no format: use {', '.join(SUFFIXES)}, or --format"
        )
    is_stream = output is None or (Path(output).exists() and not Path(output).is_file() and not Path(output).is_dir())
    if found == "npy" and is_stream:
        raise click.UsageError("npy is written to a file: give --output FILE.npy, or choose jsonl")
    return found


@contextmanager
def vector_writer(output: str | None, form: str) -> Iterator[Write]:
    """Open ``output``, or stdout for None. A file is renamed to its name when the block ends without an exception.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = None if output is None else Path(output)
    try:
        if path is None:
            yield _lines_to(sys.stdout.buffer)
            sys.stdout.buffer.flush()
        elif path.exists() and not path.is_file():
            with path.open("wb") as stream:
                yield _lines_to(stream)
        else:
            with whole_file(path.resolve()) as file:  # the file that a link names is replaced, not the link
                array = NpyFile(file)
                yield array.write if form == "npy" else _lines_to(file)
                if form == "npy":
                    array.finish()
    except OSError as error:
        if output is None or (error.filename is None and isinstance(error, BrokenPipeError)):
            raise
        raise ConfigError(f"{quoted(output)} cannot be written: {error.strerror or error}") from error


def _lines_to(file: BinaryIO) -> Write:
    """Return a function that writes one object per text: that of the input, or one with ``text``, and the vector."""

    def write(entries: Sequence[TextEntry], vectors: NDArray[np.float32]) -> None:
        for entry, vector in zip(entries, vectors.tolist(), strict=True):
            fields = {**(entry.fields or {"text": entry.text})}
            fields.pop(EMBEDDING, None)
            values = ", ".join(f"{value:.9g}" for value in vector)  # 9 digits are all of float32
            head = json.dumps(fields, ensure_ascii=False)[:-1]
            file.write(f'{head}{", " if fields else ""}"{EMBEDDING}": [{values}]}}\n'.encode())

    return write


class NpyFile:
    """An array ``[n, width]``. The header, which holds n, is written again at the end; numpy leaves room for it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_rows = 0
        self._width = 0

    def write(self, entries: Sequence[TextEntry], vectors: NDArray[np.float32]) -> None:
        """Write the vectors ``[n, width]``; the texts are not kept."""
        del entries
        if not self._num_rows:
            self._width = vectors.shape[1]
            self._write_header()
        self._num_rows += len(vectors)
        self._file.write(np.ascontiguousarray(vectors, "<f4").tobytes())

    def finish(self) -> None:
        """Write the header with the number of rows."""
        self._file.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        described: dict[str, Any] = {"descr": "<f4", "fortran_order": False, "shape": (self._num_rows, self._width)}
        np.lib.format.write_array_header_1_0(self._file, described)

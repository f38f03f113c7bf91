"""Writes vectors as NPY, JSON lines or Parquet, batch by batch, to a file that appears only when it is whole, or to stdout."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import click
import numpy as np
from numpy.typing import NDArray

from staticllm.cli.embedding.texts import BATCH_TEXTS, Entry
from staticllm.errors import ConfigError
from staticllm.system.files import whole_file

FORMATS = ("npy", "jsonl", "parquet")
SUFFIXES = {".npy": "npy", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
EMBEDDING = "embedding"
"""The field of JSON lines and the column of Parquet that hold the vector."""
ROW_GROUP = 16 * BATCH_TEXTS


class BatchWriter(Protocol):
    """Writes the vectors of batches, one after another."""

    def write(self, entries: Sequence[Entry], vectors: NDArray[Any]) -> None:
        """Write ``vectors [n, width]`` of ``n`` texts."""


class VectorWriter(BatchWriter, Protocol):
    """Writes a file. Either ``close`` or ``discard`` is called at the end."""

    def close(self) -> None:
        """Write the end; the file itself stays open."""

    def discard(self) -> None:
        """Release what is held; the file is dropped."""


def chosen_format(output: str | None, named: str | None) -> str:
    """Return the format that is named, or that the file's suffix says; JSON lines for stdout.

    Raises:
        UsageError: neither says it.
    """
    if named is not None or output is None:
        return named or "jsonl"
    found = SUFFIXES.get(Path(output).suffix.lower())
    if found is None:
        raise click.UsageError(
            f"--output {output!r}: the suffix says no format: use {', '.join(SUFFIXES)}, or --format"
        )
    return found


def check_parquet() -> None:
    """Check that pyarrow is installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        import pyarrow.parquet  # noqa: F401  # pyright: ignore[reportMissingImports] - only whether it can be imported
    except ImportError:
        raise ConfigError("Parquet needs pyarrow: pip install 'staticllm[parquet]', or choose npy or jsonl") from None


@contextmanager
def vector_writer(output: str | None, form: str) -> Iterator[VectorWriter]:
    """Open ``output``, or stdout for None. A file is renamed to its name when the block ends without an exception.

    What is written to stdout or a pipe as NPY or Parquet goes there at the end, because a part of it could not be read.

    Raises:
        ConfigError: the file cannot be written.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(_target(output, is_stream=form == "jsonl"))
            writer = _writer(file, form)
            stack.push(lambda kind, error, trace: writer.close() if kind is None else writer.discard())
            yield writer
            stack.close()
        except OSError as error:
            if output is None or (error.filename is None and isinstance(error, BrokenPipeError)):
                raise
            raise ConfigError(f"{output!r} cannot be written: {error.strerror or error}") from error


def _writer(file: BinaryIO, form: str) -> VectorWriter:
    if form == "parquet":
        return ParquetWriter(file)
    return NpyWriter(file) if form == "npy" else JsonLinesWriter(file)


@contextmanager
def _target(output: str | None, is_stream: bool) -> Iterator[BinaryIO]:
    path = None if output is None else Path(output)
    if path is not None and (path.is_file() or not path.exists()):
        with whole_file(path.resolve()) as file:  # the file that a link names is replaced, not the link
            yield file
        return
    with ExitStack() as stack:
        stream: BinaryIO = stack.enter_context(path.open("wb")) if path is not None else sys.stdout.buffer
        if is_stream:
            yield stream
        else:
            with tempfile.TemporaryFile() as scratch:
                yield cast(BinaryIO, scratch)
                scratch.seek(0)
                shutil.copyfileobj(scratch, stream)
        stream.flush()


class JsonLinesWriter:
    """One object per text: that of the input, or one with ``text``, and the vector as ``embedding``."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, entries: Sequence[Entry], vectors: NDArray[Any]) -> None:
        show = "{:.9g}".format if vectors.dtype == np.float32 else str  # 9 digits are all of float32
        for entry, vector in zip(entries, vectors.tolist(), strict=True):
            fields = {
                name: value for name, value in (entry.fields or {"text": entry.text}).items() if name != EMBEDDING
            }
            values = f'"{EMBEDDING}": [{", ".join(map(show, vector))}]'
            head = json.dumps(fields, ensure_ascii=False)
            self._file.write(f"{head[:-1]}{', ' if fields else ''}{values}}}\n".encode())

    def close(self) -> None:
        """Do nothing: the last line is the end."""

    def discard(self) -> None:
        """Do nothing: nothing is held."""


class NpyWriter:
    """An array ``[n, width]``. The header, which holds n, is written again at the end; numpy leaves room for it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_rows, self._width = 0, 0
        self._type: np.dtype[Any] | None = None

    def write(self, entries: Sequence[Entry], vectors: NDArray[Any]) -> None:
        if self._type is None:
            self._type, self._width = vectors.dtype.newbyteorder("<"), vectors.shape[1]
            self._file.write(self._header())
        self._num_rows += len(vectors)
        self._file.write(np.ascontiguousarray(vectors, self._type).tobytes())

    def close(self) -> None:
        """Write the header with the number of rows."""
        header = self._header()
        self._file.seek(0)
        self._file.write(header)
        self._file.seek(0, io.SEEK_END)

    def discard(self) -> None:
        """Do nothing: nothing is held."""

    def _header(self) -> bytes:
        assert self._type is not None
        described = {"descr": self._type.str, "fortran_order": False, "shape": (self._num_rows, self._width)}
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(buffer, described)
        return buffer.getvalue()


class ParquetWriter:
    """The columns ``text`` and ``embedding``, a list of fixed size. Several batches make one row group."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._writer: Any = None
        self._held: list[Any] = []

    def write(self, entries: Sequence[Entry], vectors: NDArray[Any]) -> None:
        import pyarrow as pa  # pyright: ignore[reportMissingImports] - of an extra
        from pyarrow.parquet import ParquetWriter as FileWriter  # pyright: ignore[reportMissingImports]

        flat = pa.array(np.ascontiguousarray(vectors).reshape(-1))
        columns = [pa.array([e.text for e in entries], pa.string()),
                   pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])]  # fmt: skip
        table = pa.Table.from_arrays(columns, names=["text", EMBEDDING])
        if self._writer is None:
            self._writer = FileWriter(self._file, table.schema)
        self._held.append(table)
        if sum(map(len, self._held)) >= ROW_GROUP:
            self._flush()

    def close(self) -> None:
        """Write the last row group and the index of the file."""
        self._flush()
        self._writer.close()

    def discard(self) -> None:
        """Close pyarrow's writer, which would otherwise write to the closed file when it is collected."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa  # pyright: ignore[reportMissingImports] - of an extra

        if self._held:
            self._writer.write_table(pa.concat_tables(self._held))
            self._held.clear()

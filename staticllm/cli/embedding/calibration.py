"""Converts vectors to the output type; int8 and uint8 need ranges, from a file or from all vectors of the run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from staticllm.cli.embedding.texts import Entry
from staticllm.cli.embedding.vector_files import BatchWriter
from staticllm.errors import ConfigError
from staticllm.pipelines.embedding.output_types import (
    OutputType,
    Ranges,
    check_output_type,
    convert,
    has_ranges,
    ranges_of,
    warn_about_few,
)

ROWS_PER_READ = 4096


def read_calibration(path: str) -> NDArray[Any]:
    """Return the vectors of an NPY file, mapped, not read.

    Raises:
        ConfigError: it is no array of numbers ``[n, width]``.
    """
    try:
        with Path(path).open("rb") as file:
            is_npy = file.read(6) == b"\x93NUMPY"
        if not is_npy:
            raise ValueError("it does not begin as one")
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"--calibration {path!r} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise ConfigError(f"--calibration {path!r} is not an NPY file of numbers ({error})") from None
    if found.ndim != 2 or not np.issubdtype(found.dtype, np.floating):
        raise ConfigError(
            f"--calibration {path!r} holds {found.dtype} of the shape {list(found.shape)}: must be floats [n, width]"
        )
    return cast("NDArray[Any]", found)


@contextmanager
def converting(
    writer: BatchWriter, output_type: OutputType, calibration: str | None, width: int
) -> Iterator[BatchWriter]:
    """Give a writer of float32 vectors that hands them to ``writer`` in another type.

    Raises:
        ConfigError: the calibration does not fit.
    """
    given = None if calibration is None else read_calibration(calibration)
    check_output_type(output_type, given, width)
    if given is None and has_ranges(output_type):
        with ExitStack() as stack:
            files = [cast(BinaryIO, stack.enter_context(tempfile.TemporaryFile())) for _ in range(2)]
            spool = Spool(writer, output_type, files[0], files[1])
            yield spool
            spool.close()
    else:
        yield Converter(writer, output_type, None if given is None else ranges_of(given))


class Converter:
    """Converts each batch by itself."""

    def __init__(self, writer: BatchWriter, output_type: OutputType, ranges: Ranges | None) -> None:
        self._writer, self._ranges = writer, ranges
        self._output_type: OutputType = output_type

    def write(self, entries: Sequence[Entry], vectors: NDArray[Any]) -> None:
        self._writer.write(entries, convert(vectors, self._output_type, self._ranges))


class Spool:
    """Keeps all batches in two temporary files until the ranges of all vectors are known."""

    def __init__(self, writer: BatchWriter, output_type: OutputType, texts: BinaryIO, vectors: BinaryIO) -> None:
        self._writer, self._texts, self._vectors = writer, texts, vectors
        self._output_type: OutputType = output_type
        self._num_rows, self._ranges = 0, np.zeros((0, 0), np.float32)

    def write(self, entries: Sequence[Entry], vectors: NDArray[Any]) -> None:
        for entry in entries:
            self._texts.write(json.dumps([entry.text, entry.line, entry.fields]).encode() + b"\n")
        self._vectors.write(vectors.tobytes())
        known = vectors if not self._num_rows else np.concatenate((self._ranges, vectors))
        self._ranges = np.stack((known.min(axis=0), known.max(axis=0)))
        self._num_rows += len(vectors)

    def close(self) -> None:
        """Convert all batches by their common ranges.

        Raises:
            ConfigError: there was only one vector.
        """
        if self._num_rows < 2:
            ranges_of(self._ranges[:1])  # raises
        warn_about_few(self._num_rows)
        width = self._ranges.shape[1]
        self._texts.seek(0)
        self._vectors.seek(0)
        while data := self._vectors.read(ROWS_PER_READ * width * 4):
            vectors = np.frombuffer(data, np.float32).reshape(-1, width)
            entries = [Entry(*json.loads(self._texts.readline())) for _ in range(len(vectors))]
            self._writer.write(entries, convert(vectors, self._output_type, self._ranges))

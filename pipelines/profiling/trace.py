"""Records of every step, kept while somebody asks for them; saved as a Chrome trace and read back."""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from staticllm.errors import ConfigError, StaticLLMError
from staticllm.files import write_whole
from staticllm.pipelines.profiling.chrome_trace import from_chrome, to_chrome
from staticllm.pipelines.profiling.records import Record, RequestRecord, StepRecord
from staticllm.pipelines.profiling.stats import Profiler

MAX_RECORDS = 100_000
"""Some hundred bytes each, and as much again in the file."""


class Trace:
    """What an engine did: a record a device call, and one a request that has ended.

    Holds the last ``max_records``; ``num_dropped`` older ones are gone.
    """

    def __init__(self, records: Iterable[Record] = (), max_records: int = MAX_RECORDS) -> None:
        self._records: deque[Record] = deque(maxlen=max_records)
        self.num_dropped = 0
        for record in records:
            self.append(record)

    def append(self, record: Record) -> None:
        if len(self._records) == self._records.maxlen:
            self.num_dropped += 1
        self._records.append(record)

    @property
    def steps(self) -> list[StepRecord]:
        """Device calls, in their order."""
        return [record for record in tuple(self._records) if isinstance(record, StepRecord)]

    @property
    def requests(self) -> list[RequestRecord]:
        """Requests that have ended, in the order of their ends."""
        return [record for record in tuple(self._records) if isinstance(record, RequestRecord)]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace, JSON: for Perfetto (ui.perfetto.dev), chrome://tracing and ``staticllm trace draw``.

        Raises:
            ConfigError: the file cannot be written.
        """
        text = json.dumps(to_chrome(self.steps, self.requests, self.num_dropped), separators=(",", ":"))
        try:
            write_whole(path, f"{text}\n".encode())
        except OSError as error:
            raise ConfigError(f"cannot write {str(path)!r} ({error.strerror}): choose another path") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read what ``save`` wrote. Times begin at 0, to the nanosecond.

        Raises:
            ConfigError: no such file, or no trace of ours in it.
        """
        remedy = "record one with 'staticllm trace record'"
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {str(path)!r} ({error.strerror}): {remedy}") from error
        except ValueError as error:
            raise ConfigError(f"{str(path)!r} is not JSON ({error}): {remedy}") from error
        try:
            steps, requests, num_dropped = from_chrome(document)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{str(path)!r} is not a trace of staticllm ({error!r}): {remedy}") from error
        if not steps:
            raise ConfigError(f"{str(path)!r} holds no device calls of staticllm: {remedy}")
        trace = cls([*steps, *requests], len(steps) + len(requests))
        trace.num_dropped = num_dropped
        return trace


@contextmanager
def recording(profiler: Profiler, max_records: int = MAX_RECORDS) -> Iterator[Trace]:
    """Record while a block runs. Warns at its end if there were more than ``max_records``.

    Raises:
        StaticLLMError: somebody records already.
        ConfigError: room for less than one record.
    """
    if not isinstance(max_records, int) or max_records < 1:
        raise ConfigError(f"max_records={max_records!r}: must be a whole number, 1 or more")
    if profiler.trace is not None:
        raise StaticLLMError("a trace is being recorded already: end that one first")
    trace = Trace(max_records=max_records)
    profiler.trace = trace
    try:
        yield trace
    finally:
        profiler.trace = None
        if trace.num_dropped:
            warnings.warn(
                f"the trace lost its {trace.num_dropped} oldest records, it holds {max_records}: "
                "record a shorter time, or with a larger max_records",
                stacklevel=3,
            )

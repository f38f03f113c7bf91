"""A trace holds the records of all device calls and requests of a recording, and is saved and read as a Chrome trace."""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from staticllm.config import is_whole
from staticllm.errors import ConfigError, StaticLLMError, quoted, shown
from staticllm.system.files import write_whole

from .chrome_trace import from_chrome, to_chrome
from .records import JobRecord, Record, RequestRecord, StepRecord
from .stats import Profiler

MAX_RECORDS = 100_000
"""The default number of records in a trace; a record takes a few hundred bytes in memory and in the file."""
MOST_RECORDS = 10**9
"""The most that can be asked for."""


class Trace:
    """The records of an engine: one per device call, and one per request that has ended.

    A trace holds the last ``max_records`` records; ``num_dropped`` counts the older ones that were dropped.
    """

    def __init__(self, records: Iterable[Record] = (), max_records: int = MAX_RECORDS) -> None:
        self._records: deque[Record] = deque(maxlen=max_records)
        self.num_dropped = 0
        for record in records:
            self.append(record)

    def append(self, record: Record) -> None:
        """Add a record; if the trace holds ``max_records``, drop the oldest one."""
        if len(self._records) == self._records.maxlen:
            self.num_dropped += 1
        self._records.append(record)

    @property
    def steps(self) -> list[StepRecord]:
        """The device calls, in the order in which they ran."""
        return [record for record in tuple(self._records) if isinstance(record, StepRecord)]

    @property
    def jobs(self) -> list[JobRecord]:
        """The calls of other models, in the order in which they ran."""
        return [record for record in tuple(self._records) if isinstance(record, JobRecord)]

    @property
    def requests(self) -> list[RequestRecord]:
        """The requests that have ended, in the order in which they did."""
        return [record for record in tuple(self._records) if isinstance(record, RequestRecord)]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace (JSON) for Perfetto (ui.perfetto.dev) and chrome://tracing.

        Raises:
            ConfigError: the file cannot be written.
        """
        text = json.dumps(to_chrome(self.steps, self.requests, self.num_dropped, self.jobs), separators=(",", ":"))
        try:
            write_whole(path, f"{text}\n".encode())
        except OSError as error:
            raise ConfigError(f"cannot write {quoted(path)} ({error.strerror}): choose another path") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a file that ``save`` wrote. Moments count from 0 s and are exact to a nanosecond.

        Raises:
            ConfigError: the file is missing, or is not a trace of staticllm.
        """
        remedy = "record one with 'staticllm trace record'"
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {quoted(path)} ({error.strerror}): {remedy}") from error
        except ValueError as error:
            raise ConfigError(f"{quoted(path)} is not JSON ({error}): {remedy}") from error
        try:
            recorded = from_chrome(document)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{quoted(path)} is not a trace of staticllm ({error!r}): {remedy}") from error
        if not recorded.steps:
            raise ConfigError(f"{quoted(path)} holds no device calls of staticllm: {remedy}")
        records: list[Record] = [*recorded.steps, *recorded.requests, *recorded.jobs]
        trace = cls(records, len(records))
        trace.num_dropped = recorded.num_dropped
        return trace


@contextmanager
def recording(profiler: Profiler, max_records: int = MAX_RECORDS) -> Iterator[Trace]:
    """Record while a block runs. If more than ``max_records`` records arrive, a warning at the end gives the number dropped.

    Raises:
        StaticLLMError: another recording is in progress.
        ConfigError: ``max_records`` is not a whole number of at least 1.
    """
    if not is_whole(max_records, 1, MOST_RECORDS):
        raise ConfigError(f"max_records={shown(max_records)}: must be a whole number from 1 to {MOST_RECORDS}")
    if profiler.trace is not None:
        raise StaticLLMError("a trace is being recorded already: end that one first")
    trace = Trace(max_records=int(max_records))
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

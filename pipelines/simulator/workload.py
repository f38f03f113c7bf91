"""A workload is a list of requests with arrival times and with lengths of prompts and answers."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from staticllm.core import MAX_ANSWERS
from staticllm.errors import ConfigError

from ..scheduling.interface import PROACTIVE_PRIORITY

CLASSES = {"reactive": 0, "proactive": PROACTIVE_PRIORITY}
"""The priority of each class of work in a trace."""


@dataclass(frozen=True)
class Arrival:
    """One request."""

    id: int
    time: float
    """In seconds from the start."""
    num_prompt: int
    """In tokens, like ``num_output``."""
    num_output: int
    priority: int = 0
    """Higher ones go first."""
    think: float | None = None
    """Seconds from the logits to the next token, if a client chooses tokens; None if the engine does."""
    num_answers: int = 1
    """The answers sampled after one prompt, or its beams with ``are_beams``."""
    are_beams: bool = False


@dataclass(frozen=True)
class Lengths:
    """The lengths of prompts and answers, uniformly distributed between ``(least, most)`` tokens."""

    prompt: tuple[int, int]
    output: tuple[int, int]

    @classmethod
    def fixed(cls, prompt: int, output: int) -> Lengths:
        """Return lengths that are the same for every request."""
        return cls((prompt, prompt), (output, output))

    def draw(self, times: Iterable[float], rng: np.random.Generator) -> list[Arrival]:
        """Return one request per moment in ``times`` (seconds).

        Raises:
            ConfigError: a length is not a whole number from 1, or ``least`` is more than ``most``.
        """
        return [
            Arrival(number, time, _between(self.prompt, rng), _between(self.output, rng))
            for number, time in enumerate(times)
        ]


def poisson(rate: float, count: int, lengths: Lengths, seed: int = 0, is_span_fixed: bool = False) -> list[Arrival]:
    """Return ``count`` requests, on average ``rate`` per second, with exponentially distributed gaps.

    ``is_span_fixed`` stretches the gaps so that the last request arrives at ``count / rate``, as vLLM's benchmark does.

    Raises:
        ConfigError: ``rate`` is not positive, ``count`` is less than 1, or a length is impossible.
    """
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / _positive("rate", rate), _count(count)))
    if is_span_fixed:
        times *= count / rate / times[-1]
    return lengths.draw(times.tolist(), rng)


def uniform(rate: float, count: int, lengths: Lengths, seed: int = 0) -> list[Arrival]:
    """Return ``count`` requests, one every ``1 / rate`` seconds.

    Raises:
        ConfigError: as for ``poisson``.
    """
    gap = 1 / _positive("rate", rate)
    return lengths.draw((number * gap for number in range(_count(count))), np.random.default_rng(seed))


def burst(count: int, lengths: Lengths, seed: int = 0) -> list[Arrival]:
    """Return ``count`` requests, all at time 0.

    Raises:
        ConfigError: ``count`` is less than 1, or a length is impossible.
    """
    return lengths.draw([0.0] * _count(count), np.random.default_rng(seed))


def read_trace(path: str | os.PathLike[str]) -> list[Arrival]:
    """Return the requests in a file of JSON lines, or of CSV with a header.

    Each has an ``arrival`` (seconds), the lengths ``prompt`` and ``output`` (tokens) and optionally a ``priority``, a number of
    ``answers``, or one of ``beams``. A ``class``, ``reactive`` or ``proactive``, stands for the priority 0 or -1. Times are
    shifted so that the earliest is 0.

    Raises:
        ConfigError: a line is not such a request; the error names file and line.
        OSError: the file cannot be read.
    """
    place = Path(path)
    try:
        lines = place.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: is not UTF-8 text ({error.reason}); give JSON lines or CSV") from None
    rows = _csv_rows(lines) if place.suffix.lower() == ".csv" else _json_rows(place, lines)
    arrivals = [_arrival(place, line, number, row) for number, (line, row) in enumerate(rows)]
    if not arrivals:
        raise ConfigError(f"{place}: holds no request; write one line per request, with arrival, prompt and output")
    return from_zero(arrivals)


def from_zero(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Return the requests in the order of their times, shifted so that the earliest time is 0."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.time)
    start = ordered[0].time
    return [replace(arrival, time=arrival.time - start) for arrival in ordered]


def _csv_rows(lines: list[str]) -> list[tuple[int, Any]]:
    return list(enumerate(csv.DictReader(lines), 2))


def _json_rows(place: Path, lines: list[str]) -> list[tuple[int, Any]]:
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append((number, json.loads(line)))
            except json.JSONDecodeError as error:
                raise ConfigError(f"{place}:{number}: {error.msg}; each line must be one JSON object") from None
    return rows


def _arrival(place: Path, line: int, number: int, row: Any) -> Arrival:
    try:
        beams = int(row.get("beams") or 1)
        answers = int(row.get("answers") or 1)
        arrival = Arrival(
            number, float(row["arrival"]), int(row["prompt"]), int(row["output"]), _priority(row),
            num_answers=max(beams, answers), are_beams=beams > 1,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{place}:{line}: {reason}; a request has arrival (s), prompt and output (tokens)") from None
    if not np.isfinite(arrival.time) or min(arrival.num_prompt, arrival.num_output, beams, answers) < 1:
        raise ConfigError(f"{place}:{line}: arrival must be a number, prompt, output, answers and beams 1 or more")
    if arrival.num_answers > MAX_ANSWERS or (beams > 1 and answers > beams):
        raise ConfigError(f"{place}:{line}: at most {MAX_ANSWERS} answers or beams, and no more answers than beams")
    return arrival


def _priority(row: Any) -> int:
    """Return the priority of a request in a trace, by its number or by its class.

    Raises:
        ValueError: the class is none.
    """
    name = row.get("class") or None
    if name not in (None, *CLASSES):
        raise ValueError(f"class {str(name)[:50]!r} is neither reactive nor proactive")
    given = row.get("priority")
    if given in (None, ""):
        return 0 if name is None else CLASSES[name]
    if name is not None and (int(given) < 0) != (CLASSES[name] < 0):
        raise ValueError(f"priority {int(given)} is not that of class {name}, below 0 is proactive")
    return int(given)


def _between(limits: tuple[int, int], rng: np.random.Generator) -> int:
    least, most = limits
    if not 1 <= least <= most:
        raise ConfigError(f"lengths {least}-{most}: must be whole numbers from 1, the smaller first")
    return least if least == most else int(rng.integers(least, most + 1))


def _positive(name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name}={value:g}: must be more than 0")
    return value


def _count(count: int) -> int:
    if count < 1:
        raise ConfigError(f"{count} requests: must be 1 or more")
    return count

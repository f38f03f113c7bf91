"""Keeps estimates of queue depths in a JSON file beside a cache, for the model and the machine that they were measured with."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from staticllm.errors import ConfigError
from staticllm.pipelines.embedding.queue.loads import Line
from staticllm.pipelines.embedding.windve.queue_depth import MAX_DEPTH, Estimate
from staticllm.system.files import read_regular, write_whole

VERSION = 1
MAX_BYTES = 1 << 20
MAX_SECONDS = 1e6
_REMEDY = "delete the file, and the queue depths are measured again"


def write_estimates(path: str | os.PathLike[str], key: str, estimates: Sequence[Estimate]) -> None:
    """Write the estimates. ``key`` names everything that they depend on: model, machine, length of the texts.

    Raises:
        OSError: the file cannot be written; the previous file is unchanged.
    """
    devices = [
        {"name": e.name, "alpha": e.line.alpha, "beta": e.line.beta, "exponent": e.line.exponent, "r2": e.r2,
         "limit_s": e.limit_s, "tuned": e.tuned}
        for e in estimates
    ]  # fmt: skip
    text = json.dumps({"version": VERSION, "key": key, "devices": devices}, indent=2, allow_nan=False)
    write_whole(path, text.encode())


def read_estimates(path: str | os.PathLike[str], key: str | None = None) -> tuple[Estimate, ...]:
    """Return the estimates in a file; empty if there is no file, or if it was written with another ``key``.

    Raises:
        ConfigError: the file cannot be read, is damaged or holds impossible values; the error names the first.
    """
    place = Path(path)
    try:
        found = json.loads(read_regular(place, MAX_BYTES))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"{place.name}: cannot be read ({error.strerror or error}); {_REMEDY}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place.name}: is not JSON ({error}); {_REMEDY}") from None
    if not isinstance(found, dict) or found.get("version") != VERSION or not isinstance(found.get("devices"), list):
        raise ConfigError(f"{place.name}: is not a list of queue depths of version {VERSION}; {_REMEDY}")
    if key is not None and found.get("key") != key:
        return ()
    estimates = tuple(
        _estimate(f"{place.name}, device {number}", entry) for number, entry in enumerate(found["devices"], 1)
    )
    if len({found.name for found in estimates}) < len(estimates):
        raise ConfigError(f"{place.name}: names a device twice; {_REMEDY}")
    return estimates


def _estimate(place: str, entry: object) -> Estimate:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise ConfigError(f"{place}: has no name; {_REMEDY}")
    alpha, beta, exponent = (_number(place, entry, name, 0.0) for name in ("alpha", "beta", "exponent"))
    r2 = _number(place, entry, "r2", -MAX_SECONDS)
    limit_s = _number(place, entry, "limit_s", 0.0)
    tuned = entry.get("tuned")
    is_depth = isinstance(tuned, int) and not isinstance(tuned, bool) and 0 <= tuned <= MAX_DEPTH
    if tuned is not None and not is_depth:
        raise ConfigError(f"{place}: tuned is {tuned!r}, must be a whole number from 0 to {MAX_DEPTH}; {_REMEDY}")
    if limit_s == 0 or alpha + beta == 0:
        raise ConfigError(f"{place}: limit_s and one of alpha and beta must be more than 0; {_REMEDY}")
    return Estimate(entry["name"], Line(alpha, beta, exponent), r2, limit_s, tuned)


def _number(place: str, entry: dict[str, object], name: str, least: float) -> float:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= MAX_SECONDS:
        raise ConfigError(
            f"{place}: {name} is {value!r}, must be a number from {least:g} to {MAX_SECONDS:g}; {_REMEDY}"
        )
    return float(value)

"""Computes the costs of device calls in the simulator, from a formula or from a file, and the costs of the host."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staticllm.core import Variant
from staticllm.errors import ConfigError
from staticllm.pipelines.costs.model import CostModel
from staticllm.system.files import write_whole

Cost = Callable[[Variant], float]
"""Returns the seconds that one call of a variant takes."""


@dataclass(frozen=True)
class AnalyticCosts:
    """The seconds per call: ``fixed + weights + row * rows + attention * rows * (kv_len + rows)``.

    ``weights`` is the time to read the weights once, ``attention`` that per row and KV slot (or row) that it attends to.
    """

    weights: float
    row: float
    attention: float = 0.0
    fixed: float = 0.0

    def __call__(self, variant: Variant) -> float:
        seen = variant.rows * (variant.kv_len + variant.rows)
        return self.fixed + self.weights + self.row * variant.rows + self.attention * seen


@dataclass(frozen=True)
class HostCost:
    """The seconds of the host between two device calls: ``step + row * num_rows + sequence * num_sequences``.

    ``swap``: seconds per KV slot that is copied to or from the host pool. ``answer``: from the end of a call to its tokens.
    ``wake``: from a request's arrival at an idle device to its call; None for the formula.
    """

    step: float = 0.0
    row: float = 0.0
    sequence: float = 0.0
    answer: float = 0.0
    wake: float | None = None
    swap: float = 0.0

    def __call__(self, num_rows: int, num_sequences: int) -> float:
        return self.step + self.row * num_rows + self.sequence * num_sequences


def write_costs(path: str | os.PathLike[str], variants: Iterable[Variant], cost: Cost) -> None:
    """Write a JSON list of ``{rows, kv_len, sequences, seconds}``, one entry per variant.

    Raises:
        OSError: the file cannot be written.
    """
    entries = [
        {"rows": v.rows, "kv_len": v.kv_len, "sequences": v.sequences, "seconds": cost(v)} for v in sorted(variants)
    ]
    text = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    write_whole(path, f"[\n{text}\n]\n".encode())


def read_costs(path: str | os.PathLike[str]) -> tuple[tuple[Variant, ...], CostModel[Variant]]:
    """Return the variants in a file that ``write_costs`` wrote, and their costs.

    Raises:
        ConfigError: the file has another content; the error names the entry.
        OSError: the file cannot be read.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: is not JSON ({error}); `staticllm simulate --save-costs` writes such a file"
        ) from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: must be a list of {{rows, kv_len, sequences, seconds}} with at least one entry")
    seconds = dict(_entry(f"{path}, entry {number}", entry) for number, entry in enumerate(entries, 1))
    if not any(variant.kv_len for variant in seconds):
        raise ConfigError(f"{path}: every kv_len is 0, so that no program can read the KV cache; add one that can")
    return tuple(seconds), CostModel(seconds)


def _entry(place: str, entry: Any) -> tuple[Variant, float]:
    try:
        variant = Variant(int(entry["rows"]), int(entry["kv_len"]), int(entry.get("sequences", 1)))
        seconds = float(entry["seconds"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{place}: {reason}; it must have rows, kv_len, sequences and seconds") from None
    if variant.rows < 1 or variant.kv_len < 0 or not 1 <= variant.sequences <= variant.rows or not 0 < seconds < 1e6:
        raise ConfigError(f"{place}: {entry}: rows and seconds must be more than 0, sequences from 1 to rows")
    return variant, seconds

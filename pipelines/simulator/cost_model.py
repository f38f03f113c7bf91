"""What calls cost in the simulator: a formula, or a table in a file; and what the host adds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staticllm.core import Variant
from staticllm.errors import ConfigError
from staticllm.files import write_whole
from staticllm.pipelines.programs.cost_model import CostModel

Cost = Callable[[Variant], float]


@dataclass(frozen=True)
class AnalyticCosts:
    """Seconds a call by formula: ``fixed`` + ``weights`` (reading them) + ``row`` a row + ``attention`` a row and past row."""

    weights: float
    row: float
    attention: float = 0.0
    fixed: float = 0.0

    def __call__(self, variant: Variant) -> float:
        seen = variant.rows * (variant.kv_len + variant.rows)
        return self.fixed + self.weights + self.row * variant.rows + self.attention * seen


@dataclass(frozen=True)
class HostCost:
    """Seconds between two calls of the device: planning, copying, choosing tokens.

    ``answer`` of them, on average, have passed when a token is out. A request that finds the device idle is in a call
    after ``wake``, if that is known.
    """

    step: float = 0.0
    row: float = 0.0
    sequence: float = 0.0
    answer: float = 0.0
    wake: float | None = None

    def __call__(self, num_rows: int, num_sequences: int) -> float:
        return self.step + self.row * num_rows + self.sequence * num_sequences


def write_costs(path: str | os.PathLike[str], variants: Iterable[Variant], cost: Cost) -> None:
    """A JSON list of ``{rows, kv_len, sequences, seconds}``."""
    entries = [
        {"rows": v.rows, "kv_len": v.kv_len, "sequences": v.sequences, "seconds": cost(v)} for v in sorted(variants)
    ]
    text = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    write_whole(path, f"[\n{text}\n]\n".encode())


def read_costs(path: str | os.PathLike[str]) -> tuple[tuple[Variant, ...], CostModel]:
    """The variants of such a file, and what they cost.

    Raises:
        ConfigError: no such list; names the entry.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: is not JSON ({error}); `staticllm simulate --save-costs` writes such a file"
        ) from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: must be a list of {{rows, KV length, sequences, seconds}}, with one entry at least")
    seconds = dict(_entry(f"{path}, entry {number}", entry) for number, entry in enumerate(entries, 1))
    if not any(variant.kv_len for variant in seconds):
        raise ConfigError(f"{path}: every KV length is 0, no program sees a past; add one that does")
    return tuple(seconds), CostModel(seconds)


def _entry(place: str, entry: Any) -> tuple[Variant, float]:
    try:
        variant = Variant(int(entry["rows"]), int(entry["kv_len"]), int(entry.get("sequences", 1)))
        seconds = float(entry["seconds"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{place}: {reason}; it must have rows, KV length, sequences and seconds") from None
    if variant.rows < 1 or variant.kv_len < 0 or not 1 <= variant.sequences <= variant.rows or not 0 < seconds < 1e6:
        raise ConfigError(f"{place}: {entry}: rows and seconds must be more than 0, sequences from 1 to rows")
    return variant, seconds

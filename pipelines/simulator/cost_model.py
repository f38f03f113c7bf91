"""Computes the costs of device calls in the simulator, from a formula or from a file, and the costs of the host."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from staticllm.core import Count, Size, Variant
from staticllm.errors import ConfigError
from staticllm.system.files import write_whole
from staticllm.system.typed import json_of, typed

from ..costs.model import CostModel

Cost = Callable[[Variant], float]
"""Returns the seconds that one call of a variant takes."""


@dataclass(frozen=True)
class AnalyticCosts:
    """The seconds per call: ``fixed + weights + row * rows + attention * rows * (kv_len + rows)``."""

    weights: float
    """Seconds to read the weights once."""
    row: float
    attention: float = 0.0
    """Seconds per row and KV slot (or row) that it attends to."""
    fixed: float = 0.0

    def __call__(self, variant: Variant) -> float:
        seen = variant.rows * (variant.kv_len + variant.rows)
        return self.fixed + self.weights + self.row * variant.rows + self.attention * seen


@dataclass(frozen=True)
class Blocks:
    """How the calls of a device are divided: ``num_blocks`` equal blocks, then a tail of ``tail`` seconds, both in their costs.

    Between two blocks other calls may run.
    """

    num_blocks: int = 1
    tail: Cost = lambda variant: 0.0


@dataclass(frozen=True)
class HostCost:
    """The seconds of the host between two device calls: ``step + row * num_rows + sequence * num_sequences``."""

    step: float = 0.0
    row: float = 0.0
    sequence: float = 0.0
    answer: float = 0.0
    """From the end of a call to its tokens."""
    wake: float | None = None
    """From a request's arrival at an idle device to its call; None for the formula."""
    swap: float = 0.0
    """Seconds per KV slot that is copied to or from the host pool."""

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
        entries = typed(json_of(Path(path).read_bytes()), list[_CostRow])
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; `staticllm simulate --save-costs` writes such a file") from None
    if not entries:
        raise ConfigError(f"{path}: holds no entry; `staticllm simulate --save-costs` writes such a file")
    for number, entry in enumerate(entries, 1):
        if entry.sequences > entry.rows:
            raise ConfigError(f"{path}, entry {number}: {entry.sequences} sequences, more than its {entry.rows} rows")
    if not any(entry.kv_len for entry in entries):
        raise ConfigError(f"{path}: every kv_len is 0, so that no program can read the KV cache; add one that can")
    seconds = {Variant(entry.rows, entry.kv_len, entry.sequences): entry.seconds for entry in entries}
    return tuple(seconds), CostModel(seconds)


@dataclass(frozen=True)
class _CostRow:
    rows: Size
    kv_len: Count
    seconds: Annotated[float, Meta(gt=0, lt=1e6)]
    sequences: Size = 1

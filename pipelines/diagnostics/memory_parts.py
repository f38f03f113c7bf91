"""Divides the private memory of a process among the parts of a pipeline, from readings taken after each stage of its life.

KV slots, buffers, the host pool and the mapped weights file are counted by themselves. The rest of each reading grows from stage
to stage, and each growth belongs to the part that the stage was about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

UNEXPLAINED = "unexplained rest"


@dataclass(frozen=True)
class MemoryStage:
    """Private memory in bytes after one stage, and how much of it was counted by itself (``counted``, by part).

    ``part`` is the part to which the growth of what was not counted belongs; None if no part explains it.
    """

    name: str
    part: str | None
    private: int
    counted: Mapping[str, int]

    @property
    def others(self) -> int:
        """The bytes that were not counted by themselves."""
        return self.private - sum(self.counted.values())


@dataclass(frozen=True)
class MeasuredMemory:
    """The private memory of a pipeline in a process of its own (``staticllm plan --measured``), in bytes.

    ``bytes`` has an entry per part, and ``private`` is their sum, after the last of ``stages``. ``unknown`` says in one line what
    this system does not tell; it is empty on Linux.
    """

    model: str
    device: str
    stages: tuple[MemoryStage, ...]
    bytes: Mapping[str, int]
    private: int
    unknown: str

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``staticllm plan --measured --json`` prints."""
        return asdict(self)


def divide(stages: Sequence[MemoryStage]) -> dict[str, int]:
    """Return the bytes of each part after the last stage, which add up to its private memory; the rest comes last."""
    parts: dict[str, int] = {}
    before = rest = 0
    for stage in stages:
        growth, before = stage.others - before, stage.others
        if stage.part is None:
            rest += growth
        else:
            parts[stage.part] = parts.get(stage.part, 0) + growth
    return {**parts, **stages[-1].counted, UNEXPLAINED: rest}

"""Memory of this process and of devices: what is private, what of an array or a mapped file is in memory, and for which part.

KV slots, buffers, the host pool and the mapped weights file are counted by themselves. The rest of each reading grows from stage
to stage of a pipeline's life, and each growth belongs to the part that the stage was about.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from numpy.typing import NDArray

from staticllm.devices import kind

if TYPE_CHECKING:
    import openvino as ov

IS_DETAILED = sys.platform == "linux"
"""Whether the system tells which pages of an array or a file are in memory."""
PAGEMAP, SMAPS = Path("/proc/self/pagemap"), Path("/proc/self/smaps")
ENTRY_BYTES = 8
ONLY_HERE = np.uint64(1 << 56)
"""The bit of a page in the page map: it is in memory and belongs to this process alone (Linux 4.2)."""
UNEXPLAINED = "unexplained rest"


def private_bytes() -> int:
    """Return the bytes of memory that this process alone uses: those that would be free if it ended."""
    return int(psutil.Process().memory_full_info().uss)


def written_bytes(address: int, num_bytes: int) -> int:
    """Return the bytes from ``address`` on whose pages are in memory; 0 where the system does not tell."""
    if not IS_DETAILED or not num_bytes:
        return 0
    first = address // mmap.PAGESIZE
    end = -(-(address + num_bytes) // mmap.PAGESIZE)
    try:
        with PAGEMAP.open("rb") as file:
            file.seek(first * ENTRY_BYTES)
            entries: NDArray[np.uint64] = np.frombuffer(file.read((end - first) * ENTRY_BYTES), np.uint64)
    except OSError:
        return 0
    return min(int(np.count_nonzero(entries & ONLY_HERE)) * mmap.PAGESIZE, num_bytes)


def mapped_bytes(path: Path) -> int:
    """Return the private bytes of a file's mappings that are in memory; 0 where the system does not tell."""
    if not IS_DETAILED:
        return 0
    try:
        lines = SMAPS.read_bytes().splitlines()
    except OSError:
        return 0
    total = 0
    is_of_file = False
    name = bytes(path.resolve())
    for line in lines:
        first, _, rest = line.partition(b" ")
        if not first.endswith(b":"):
            is_of_file = line.endswith(name)
        elif is_of_file and first in (b"Private_Clean:", b"Private_Dirty:"):
            total += int(rest.split()[0]) << 10
    return total


def device_memory(core: ov.Core, device: str) -> int | None:
    """Return the free bytes of a CPU's memory, or all bytes of a GPU or NPU; None if the device does not report them."""
    if kind(device) == "CPU":
        return int(psutil.virtual_memory().available)
    for name in ("GPU_DEVICE_TOTAL_MEM_SIZE", "NPU_DEVICE_TOTAL_MEM_SIZE"):
        try:
            return int(core.get_property(device, name))
        except (RuntimeError, TypeError, ValueError):
            continue
    return None


@dataclass(frozen=True)
class MemoryStage:
    """Private memory in bytes after one stage."""

    name: str
    part: str | None
    """The part to which the growth of what was not counted belongs; None if no part explains it."""
    private: int
    counted: Mapping[str, int]
    """How much of it was counted by itself, by part."""

    @property
    def others(self) -> int:
        """The bytes that were not counted by themselves."""
        return self.private - sum(self.counted.values())


@dataclass(frozen=True)
class MeasuredMemory:
    """The private memory of a pipeline in a process of its own (``staticllm plan --measured``), in bytes."""

    model: str
    device: str
    stages: tuple[MemoryStage, ...]
    bytes: Mapping[str, int]
    """An entry per part."""
    private: int
    """The sum of the parts, after the last of ``stages``."""
    unknown: str
    """Says in one line what this system does not tell; it is empty on Linux."""

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``staticllm plan --measured --json`` prints."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the lines that ``staticllm plan --measured`` prints."""
        width = max(map(len, (*self.bytes, *(stage.name for stage in self.stages))))
        rows = {"private memory after each stage on " + self.device: [(s.name, s.private) for s in self.stages]}
        rows["where it goes at the end"] = [*self.bytes.items(), ("together", self.private)]
        lines = []
        for title, parts in rows.items():
            lines += [title, *(f"  {name:<{width}} {count / 2**20:10.1f} MiB" for name, count in parts)]
        return lines + [self.unknown] * bool(self.unknown)


def divide(stages: Sequence[MemoryStage]) -> dict[str, int]:
    """Return the bytes of each part after the last stage, which add up to its private memory; the rest comes last."""
    parts: dict[str, int] = {}
    before = 0
    rest = 0
    for stage in stages:
        growth = stage.others - before
        before = stage.others
        if stage.part is None:
            rest += growth
        else:
            parts[stage.part] = parts.get(stage.part, 0) + growth
    return {**parts, **stages[-1].counted, UNEXPLAINED: rest}

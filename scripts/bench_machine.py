"""Describes the machine of a benchmark: its processor, the kind of its matrix units, and the versions of what ran."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Set
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

KINDS = {
    "amx": "AMX",
    "avx512-bf16": "AVX-512 with VNNI and bf16",
    "avx512-vnni": "AVX-512 with VNNI, without bf16",
    "avx512": "AVX-512 without VNNI",
    "avx2-vnni": "AVX2 with VNNI",
    "avx2": "AVX2 only",
    "other": "another processor",
}
"""The kinds of processors by which the plugin's kernels differ, the fastest first."""
NEEDED = {
    "amx": {"amx_bf16", "amx_int8"},
    "avx512-bf16": {"avx512_bf16", "avx512_vnni"},
    "avx512-vnni": {"avx512_vnni"},
    "avx512": {"avx512f", "avx512bw"},
    "avx2-vnni": {"avx2", "avx_vnni"},
    "avx2": {"avx2"},
    "other": set[str](),
}
"""The flags of Linux that a processor of each kind has."""
LIMIT = "ONEDNN_MAX_CPU_ISA"
LIMITS = {
    "AVX2": "avx2", "AVX2_VNNI": "avx2-vnni", "AVX512_CORE": "avx512", "AVX512_CORE_VNNI": "avx512-vnni",
    "AVX512_CORE_BF16": "avx512-bf16", "AVX512_CORE_FP16": "avx512-bf16",
}  # fmt: skip
"""The kinds to which oneDNN can be limited by an environment variable."""
PACKAGES = ("openvino", "openvino-genai", "numpy")


@dataclass(frozen=True)
class Machine:
    """Where and when a benchmark ran. ``kind`` is one of ``KINDS``, ``limit`` the value of ``ONEDNN_MAX_CPU_ISA`` or empty."""

    processor: str
    kind: str
    cores: int
    date: str
    versions: dict[str, str]
    limit: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def line(self) -> str:
        """One sentence for a report."""
        limit = f", limited by {LIMIT}={self.limit}" if self.limit else ""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"{self.date}, {self.processor} with {self.cores} cores{limit}; {versions}."


def this_machine(kind: str | None = None) -> Machine:
    """Return this machine. ``kind``: given by the user where it cannot be found out (not Linux)."""
    limit = os.environ.get(LIMIT, "").upper()
    return Machine(
        processor=_processor(),
        kind=kind or kind_of(_flags(), limit),
        cores=num_cores(),
        date=time.strftime("%Y-%m-%d"),
        versions={name: version(name).partition("+")[0] for name in PACKAGES},
        limit=limit,
    )


def kind_of(flags: Set[str], limit: str = "") -> str:
    """Return the kind of a processor with these flags, limited by oneDNN's environment variable."""
    own = next(kind for kind, needed in NEEDED.items() if needed <= flags)
    limited = LIMITS.get(limit, own)
    return max(own, limited, key=list(KINDS).index)


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _flags() -> set[str]:
    return set(_cpuinfo("flags").split())


def _processor() -> str:
    if name := _cpuinfo("model name"):
        return name
    if platform.system() == "Darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def _cpuinfo(name: str) -> str:
    path = Path("/proc/cpuinfo")
    found = re.search(rf"^{name}\s*: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE) if path.is_file() else None
    return found[1].strip() if found else ""

"""The interface of the NPU compiler, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import openvino as ov

DEFAULT_SECONDS = 600.0
"""How long one program may be compiled by default."""


@dataclass(frozen=True)
class LayerTime:
    """Predicted microseconds of one layer by engine, summed over all tasks, which run in parallel: more than it takes.

    ``name`` is that of the node, ``kind`` its operation.
    """

    name: str
    kind: str
    dma: float
    dpu: float
    shave: float

    @property
    def total(self) -> float:
        """The sum over the engines, by which layers are compared."""
        return self.dma + self.dpu + self.shave


@dataclass(frozen=True)
class Schedule:
    """What the compiler predicts for one run of a program, in microseconds.

    ``total`` is the time from the first task to the end of the last. ``engines`` has the time in which at least one task of the
    engine runs (``DMA``, ``DPU``, ``SHAVE``), and ``sums`` the sum over all of its tasks. ``repriced`` is the total with reads
    of 4-bit weights at the price of their bytes; on platforms that price them right it equals ``total``.
    """

    total: float
    repriced: float
    engines: Mapping[str, float]
    sums: Mapping[str, float]
    num_dma_tasks: int
    layers: tuple[LayerTime, ...]
    """The layers, dearest first."""


@dataclass(frozen=True)
class NPUProgram:
    """A compiled program. ``blob`` is what the NPU plugin imports, ``seconds`` what the compiler took.

    ``requirements`` is OpenVINO's property ``RUNTIME_REQUIREMENTS`` (versions, platform, tiles), about which a device can be
    asked (``COMPATIBILITY_CHECK``) before it imports the blob; empty if the compiler does not say it.

    ``schedule`` and ``trace``, the file that it was read from (JSON, opens in https://ui.perfetto.dev), exist if they were asked
    for.
    """

    blob: bytes = field(repr=False)
    schedule: Schedule | None
    seconds: float
    requirements: str = ""
    trace: bytes | None = field(default=None, repr=False)


class NPUCompiler(Protocol):
    """Compiles models for NPUs, without needing one. One program at a time is compiled; more threads wait.

    For two programs at once use two compilers: each has a process of its own.
    """

    @property
    def version(self) -> str:
        """The versions of OpenVINO and of its NPU compiler, for fingerprints. May start the process.

        Raises:
            DeviceError: the compiler does not start.
        """
        ...

    def compile(
        self,
        model: ov.Model,
        platform: str,
        properties: Mapping[str, str] | None = None,
        *,
        name: str = "",
        seconds: float = DEFAULT_SECONDS,
        with_schedule: bool = True,
    ) -> NPUProgram:
        """Return the program of a model whose shapes are static; the model is not changed.

        Args:
            model: The model.
            platform: A key of ``PLATFORMS``.
            properties: OpenVINO's properties beside ``NPU_COMPILER_TYPE`` and ``NPU_PLATFORM``. Parameters of
                ``NPU_COMPILATION_MODE_PARAMS`` are kept beside the one for the schedule.
            name: What errors call the model; its own name by default.
            seconds: After this time the compiler is ended.
            with_schedule: Whether the program has a schedule.

        Raises:
            ConfigError: the platform is unknown, or a property or the limit is impossible.
            DeviceError: the compiler does not start, refused the model (the message has its reason and, if it says so, the
                node), crashed or took too long; or the model, blob or schedule cannot be written or read. The compiler can be
                used again.
        """
        ...

    def close(self) -> None:
        """End the process at once, also while another thread's program is compiled, which raises ``DeviceError`` there.

        The next program starts another one.
        """
        ...

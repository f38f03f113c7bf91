"""An NPU that is elsewhere: what compiles for it, and what a set says of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from queue import SimpleQueue
from typing import Any

import openvino as ov

from staticllm.devices import type_name
from staticllm.errors import BlobError, ConfigError

from ...compiler_passes.artifacts.fingerprint import passes_digest
from ...compiler_passes.blocks.chain_model import ChainPart
from ...compiler_passes.compiling.chain import CompiledPart, PartBlob
from ...compiler_passes.compiling.chain_compiler import compile_for_host
from ...compiler_passes.compiling.npu_compiler import DEFAULT_SECONDS, NPUCompiler, NPUProgram
from ...compiler_passes.compiling.npu_platform import Platform

FEW_ROWS, FEW_TILES = 16, 2
"""A call of few rows waits for the weights: more tiles than these cost it time, and others need all (docs/npu.md)."""
_CHECK, _REQUIREMENTS, _SUPPORTED = "COMPATIBILITY_CHECK", "RUNTIME_REQUIREMENTS", "SUPPORTED"


@dataclass(frozen=True)
class CompiledForNPU:
    """One part that was compiled for an NPU, for reports."""

    part: ChainPart
    of: str
    """Names the program for which it was compiled."""
    program: NPUProgram = field(repr=False)
    compiled: PartBlob = field(repr=False)

    @property
    def what(self) -> str:
        """The part and its program."""
        return f"{self.part.name} of {self.of}"


@dataclass(frozen=True)
class NPUTarget:
    """The platform for which a model is compiled, and the compilers, which compile one part each at a time."""

    platform: Platform
    compilers: tuple[NPUCompiler, ...]
    on_part: Callable[[CompiledForNPU], None] = lambda part: None
    """Told of each part."""
    seconds: float = DEFAULT_SECONDS
    """How long one part may be compiled."""

    @cached_property
    def _free(self) -> SimpleQueue[NPUCompiler]:
        """The compilers that wait for a part."""
        found = SimpleQueue[NPUCompiler]()
        for compiler in self.compilers:
            found.put(compiler)
        return found

    def check_layout(self, layout: str) -> None:
        """Check that the programs are in blocks: others would be compiled on this machine.

        Raises:
            ConfigError: they are not.
        """
        if layout != "blocks":
            raise ConfigError(f"PROGRAMS={layout}, and --platform compiles programs in blocks only: leave PROGRAMS out")

    def compile_part(self, part: ChainPart, device: str, properties: Mapping[str, Any], what: str) -> CompiledPart:
        """Compile a part of a chain.

        Raises:
            DeviceError: the compiler refused it, crashed or took too long.
        """
        del device
        if part.place == "host":
            return compile_for_host(part.model)
        tiles = str(FEW_TILES if _num_rows(part) <= FEW_ROWS else self.platform.tiles)
        given = {"NPU_TILES": tiles, **{name: text_of(value) for name, value in properties.items()}}
        name = f"{part.name} of {what}"
        compiler = self._free.get()
        try:
            program = compiler.compile(part.model, self.platform.number, given, name=name, seconds=self.seconds)
        finally:
            self._free.put(compiler)
        compiled = PartBlob(part.name, program.blob, program.requirements)
        self.on_part(CompiledForNPU(part, what, program, compiled))
        return compiled

    def machine_values(self) -> dict[str, str]:
        """Return values of ``Fingerprint`` by field name. What only a device knows is empty."""
        return {
            "openvino": ov.get_version(),
            "plugin": "",
            "passes": passes_digest(),
            "device": "NPU",
            "device_name": "",
            "capabilities": "",
            "platform": self.platform.number,
            "compiler": self.compilers[0].version,
        }


def _num_rows(part: ChainPart) -> int:
    """Return how many rows a part computes, by the shape of what the part before it hands over."""
    shapes = [port.get_shape() for port in part.model.inputs if port.get_any_name().endswith(".hidden")]
    return max((math.prod(list(shape)[:-1]) for shape in shapes), default=1)


def text_of(value: object) -> str:
    """Return the value of a property as OpenVINO reads it from text."""
    if isinstance(value, bool):
        return "YES" if value else "NO"
    return str(value) if isinstance(value, (str, int, float)) else type_name(value)


def check_requirements(core: ov.Core, device: str, requirements: str) -> None:
    """Ask a device whether it can run a blob that was compiled elsewhere.

    OpenVINO 2026.4 answers with a type that Python cannot read. The version of OpenVINO must then be that of the compiler.

    Raises:
        BlobError: it cannot, or does not say; or the blob does not say what it needs.
    """
    if not requirements:
        raise BlobError(
            "a blob was compiled elsewhere and does not say what it needs: compile it with a newer OpenVINO"
        )
    try:
        answer = str(core.get_property(device, _CHECK, {_REQUIREMENTS: requirements}))
    except TypeError:
        version = ov.get_version().partition("-")[0]
        answer = _SUPPORTED if f"ov={version};" in requirements else f"it needs another OpenVINO than {version}"
    except RuntimeError as error:
        raise BlobError(
            f"{device} does not say whether it can run a blob that needs {requirements[:120]}: update its driver and OpenVINO"
        ) from error
    if answer.rpartition(".")[2].upper() != _SUPPORTED:
        raise BlobError(
            f"{device} cannot run a blob that needs {requirements[:120]} ({answer}): compile it for this NPU and driver"
        )

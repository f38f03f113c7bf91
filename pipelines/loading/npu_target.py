"""An NPU that is elsewhere: what compiles for it, and what a set says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import openvino as ov

from staticllm.compiler_passes.blocks.chain_model import ChainPart
from staticllm.devices import type_name
from staticllm.errors import BlobError
from staticllm.pipelines.artifacts.fingerprint import passes_digest
from staticllm.pipelines.npu_compiler.compiler import DEFAULT_SECONDS, NPUCompiler, NPUProgram
from staticllm.pipelines.npu_compiler.platforms import Platform
from staticllm.pipelines.programs.chain import CompiledPart, PartBlob
from staticllm.pipelines.programs.chain_compiler import compile_for_host

_CHECK, _REQUIREMENTS, _SUPPORTED = "COMPATIBILITY_CHECK", "RUNTIME_REQUIREMENTS", "SUPPORTED"


@dataclass(frozen=True)
class CompiledForNPU:
    """One part that was compiled for an NPU, for reports. ``of`` names the program for which it was compiled."""

    part: ChainPart
    of: str
    program: NPUProgram = field(repr=False)
    compiled: PartBlob = field(repr=False)

    @property
    def what(self) -> str:
        """The part and its program."""
        return f"{self.part.name} of {self.of}"


@dataclass(frozen=True)
class NPUTarget:
    """The platform for which a model is compiled, and the compiler.

    ``on_part`` is told of each part. ``seconds``: how long one part may be compiled.
    """

    platform: Platform
    compiler: NPUCompiler
    on_part: Callable[[CompiledForNPU], None] = lambda part: None
    seconds: float = DEFAULT_SECONDS

    def compile_part(self, part: ChainPart, device: str, properties: Mapping[str, Any], what: str) -> CompiledPart:
        """Compile a part of a chain. Raises ``DeviceError`` (the compiler refused it, crashed or took too long)."""
        del device
        if part.place == "host":
            return compile_for_host(part.model)
        given = {name: text_of(value) for name, value in properties.items()}
        name = f"{part.name} of {what}"
        program = self.compiler.compile(part.model, self.platform.number, given, name=name, seconds=self.seconds)
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
            "compiler": self.compiler.version,
        }


def text_of(value: object) -> str:
    """Return the value of a property as OpenVINO reads it from text."""
    if isinstance(value, bool):
        return "YES" if value else "NO"
    return str(value) if isinstance(value, (str, int, float)) else type_name(value)


def check_requirements(core: ov.Core, device: str, requirements: str) -> None:
    """Ask a device whether it can run a blob that was compiled elsewhere.

    OpenVINO 2026.4 answers with a type that Python cannot read. The version of OpenVINO must then be that of the compiler.

    Raises ``BlobError`` (it cannot, or does not say).
    """
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

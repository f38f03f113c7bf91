"""Compiles programs in blocks: each part once, for all programs of a model that have it in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import openvino as ov

from staticllm.compiler_passes.blocks.chain_model import ChainPart
from staticllm.compiler_passes.blocks.split import Splitter
from staticllm.devices import get_core, with_exact_f32
from staticllm.errors import DeviceError, last_line
from staticllm.kvcache.arena import Allocate
from staticllm.pipelines.programs.chain import CompiledChain, CompiledPart, HostPart, plan_chain
from staticllm.pipelines.programs.weight_bank import WeightBank

HOST_DEVICE = "CPU"
HOST_PROPERTIES: Mapping[str, Any] = with_exact_f32(HOST_DEVICE, {"INFERENCE_PRECISION_HINT": "f32"})
"""Where and how the host's part of a chain runs: embeddings and positions, in f32."""
CompilePart = Callable[[ChainPart, str, Mapping[str, Any], str], CompiledPart]
"""Takes a part, a device, properties and what the part belongs to. Raises ``DeviceError``."""


def compile_model(
    core: ov.Core, model: ov.Model, device: str, properties: Mapping[str, Any], what: str
) -> ov.CompiledModel:
    """Compile one model. Raises ``DeviceError`` (the device refused it)."""
    try:
        return core.compile_model(model, device, dict(properties))
    except RuntimeError as error:
        raise DeviceError(f"{device} refused {what}: {last_line(error)}") from error


def compile_for_host(model: ov.Model, what: str = "the host's part") -> HostPart:
    """Compile the host's part of a chain. Raises ``DeviceError`` (OpenVINO refused it)."""
    return HostPart(model, compile_model(get_core(), model, HOST_DEVICE, HOST_PROPERTIES, what))


def compile_here(part: ChainPart, device: str, properties: Mapping[str, Any], what: str) -> CompiledPart:
    """Compile a part for a device of this machine. Raises ``DeviceError`` (the device refused it)."""
    if part.place == "host":
        return compile_for_host(part.model, f"{part.name} of {what}")
    return compile_model(get_core(), part.model, device, properties, f"{part.name} of {what}")


class ChainCompiler:
    """Splits and compiles the programs of one model. All of them read one bank of weights.

    ``allocate`` gives memory that the device reads in place, if it has such memory. One thread uses it at a time.
    """

    def __init__(self, compile_part: CompilePart = compile_here, allocate: Allocate | None = None) -> None:
        self.bank = WeightBank(allocate)
        self._compile_part = compile_part
        self._splitter = Splitter()
        self._known: dict[Hashable, CompiledPart] = {}

    def compile(self, model: ov.Model, device: str, properties: Mapping[str, Any], what: str) -> CompiledChain:
        """Compile a static program, which is changed. Raises ``DeviceError`` (the device refused a part)."""
        chain = self._splitter.split(model)
        asked = tuple(sorted((name, str(value)) for name, value in properties.items()))
        parts = list[CompiledPart]()
        for part in chain.parts:
            key = part.key, asked
            if key not in self._known:
                self._known[key] = self._compile_part(part, device, properties, what)
            parts.append(self._known[key])
        return CompiledChain(plan_chain(chain, self.bank), parts, self.bank)

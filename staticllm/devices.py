"""What is asked of a device before anything is compiled for it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from staticllm.core import ProgramMode, RowType
from staticllm.errors import DeviceError

if TYPE_CHECKING:
    import openvino as ov

_DYNAMIC_SHAPES = ("CPU", "GPU")
"""Devices that take bounded dynamic shapes well, and repack the weights for each compiled model."""


@cache
def get_core() -> ov.Core:
    """The one ``openvino.Core`` of this process, never let go.

    The CPU plugin registers a stack for signal handlers with each Core and, when Cores die in another order than they were
    made, leaves a freed one registered: the next Ctrl-C then kills the process (OpenVINO 2026.4).
    """
    import openvino

    return openvino.Core()


def check_device(core: ov.Core, device: object) -> str:
    """The device's name, in capitals, if it is on this machine.

    Raises:
        DeviceError: it is not; the message lists the devices that are.
    """
    available = core.available_devices
    name = device.upper() if isinstance(device, str) else ""
    if any(name in (there, there.split(".")[0]) for there in available):
        return name
    raise DeviceError(f"device {device!r} is not on this machine; there are: {', '.join(available)}")


def supported_properties(core: ov.Core, device: str) -> frozenset[str]:
    """Names of the properties that the device and OpenVINO's own core take at compile time."""
    return frozenset(core.get_property(device, "SUPPORTED_PROPERTIES"))


def exact_if_asked(device: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Where f32 is asked for, f32 is meant: the CPU plugin would still quantize activations for int8 weights.

    It costs about a seventh of the speed of a decode step, and is what makes tokens equal the stateful model's.
    """
    hint = properties.get("INFERENCE_PRECISION_HINT")
    is_f32 = getattr(hint, "get_type_name", lambda: str(hint))() == "f32"
    exact = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if is_f32 and device.split(".", maxsplit=1)[0] == "CPU" else {}
    return {**exact, **properties}


def default_mode(device: str) -> ProgramMode:
    """``shared`` where dynamic shapes cost nothing and each program costs a copy of the weights, else ``separate``."""
    return "shared" if device.split(".", maxsplit=1)[0] in _DYNAMIC_SHAPES else "separate"


def merges_projections(device: str) -> bool:
    """Whether small matrices are worth merging: measured on the CPU only; GPUs do it themselves."""
    return device.split(".", maxsplit=1)[0] == "CPU"


def default_row_type(core: ov.Core, device: str, *phases: Mapping[str, Any]) -> RowType:
    """On the CPU what it computes in: f32, or bf16 if every phase does; its keys and values then are bf16 anyway. Else f16."""
    if device.split(".", maxsplit=1)[0] != "CPU":
        return "f16"
    own = core.get_property(device, "INFERENCE_PRECISION_HINT")
    hints = [properties.get("INFERENCE_PRECISION_HINT", own) for properties in phases]
    names = {getattr(hint, "get_type_name", lambda hint=hint: str(hint))() for hint in hints}
    return "bf16" if names == {"bf16"} else "f32"

"""What must be known of a device before anything is compiled for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from staticllm.core import KVType, ProgramMode
from staticllm.errors import DeviceError, last_line

if TYPE_CHECKING:
    import openvino as ov

_OF_COMPILERS = frozenset(
    ["INFERENCE_PRECISION_HINT", "EXECUTION_MODE_HINT", "PERFORMANCE_HINT", "COMPILATION_NUM_THREADS", "NPU_PLATFORM",
     "NPU_COMPILER_TYPE", "NPU_COMPILATION_MODE_PARAMS", "NPU_TILES", "NPU_TURBO", "NPU_QDQ_OPTIMIZATION"]
)  # fmt: skip
"""Properties that a plugin only lists where a device or its compiler is there."""
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


def kind(device: str) -> str:
    """What kind of device this is: ``GPU`` of ``GPU.0``."""
    return device.split(".", maxsplit=1)[0]


def type_name(value: object) -> str:
    """The name of an element type, ``f32`` say, whether it is OpenVINO's object or a text already."""
    name: str = getattr(value, "get_type_name", lambda: str(value))()
    return name


def is_present(core: ov.Core, device: str) -> bool:
    """Whether the device is on this machine: ``GPU`` or, of several, ``GPU.0``."""
    return any(device in (name, kind(name)) for name in core.available_devices)


def check_device(core: ov.Core, device: object) -> str:
    """The device's name, in capitals, if it is on this machine.

    Raises:
        DeviceError: it is not; the message lists the devices that are.
    """
    available = core.available_devices
    name = device.upper() if isinstance(device, str) else ""
    if name and is_present(core, name):
        return name
    if not available:
        raise DeviceError(
            f"device {device!r} cannot be used: OpenVINO found no device at all, not even a CPU, so its plugins are missing; "
            "an application made with PyInstaller must collect them (docs/packaging.md)"
        )
    raise DeviceError(f"device {device!r} is not on this machine; there are: {', '.join(available)}")


def check_known(core: ov.Core, device: object) -> str:
    """The device's name if it is on this machine, or an NPU or GPU: what a model would take there can be told without one.

    Raises:
        DeviceError: neither.
    """
    if isinstance(device, str) and kind(device) in ("NPU", "GPU"):
        return device
    return check_device(core, device)


def known_properties(core: ov.Core, device: str) -> frozenset[str]:
    """Names of the properties that the device takes, as far as its plugin tells where no such device is there."""
    try:
        return supported_properties(core, device) | _OF_COMPILERS
    except RuntimeError:  # a plugin without a device
        return _OF_COMPILERS


def npu_compiler_problem(core: ov.Core) -> str:
    """Why OpenVINO cannot compile for an NPU that is not here; empty where it can.

    Its NPU compiler is a library beside its plugins, which the wheels for Linux do not have. A compilation without content asks
    for it, and the error of the plugin names the missing library.
    """
    import openvino as ov
    from openvino import opset13 as ops

    value = ops.parameter([1, 1], ov.Type.f16)
    model = ov.Model([ops.relu(value)], [value])  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs
    try:
        core.compile_model(model, "NPU", {"NPU_COMPILER_TYPE": "PLUGIN", "NPU_PLATFORM": "4000"})
    except RuntimeError as error:
        library = re.search(r'Cannot load library "([^"]+)"', str(error))
        return f"{PurePath(library[1]).name} does not lie beside OpenVINO's plugins" if library else last_line(error)
    return ""


def supported_properties(core: ov.Core, device: str) -> frozenset[str]:
    """Names of the properties that the device and OpenVINO's own core take at compile time."""
    return frozenset(core.get_property(device, "SUPPORTED_PROPERTIES"))


def with_exact_f32(device: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """The properties, with quantized activations switched off where they ask for f32 on a CPU.

    The CPU plugin would still quantize activations for int8 weights. Switching that off costs about a seventh of the speed of a
    decode step, and makes tokens equal the stateful model's.
    """
    hint = properties.get("INFERENCE_PRECISION_HINT")
    is_f32 = type_name(hint) == "f32"
    exact = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if is_f32 and kind(device) == "CPU" else {}
    return {**exact, **properties}


def default_mode(device: str) -> ProgramMode:
    """``shared`` where dynamic shapes cost nothing and each program takes a copy of the weights, else ``separate``."""
    return "shared" if kind(device) in _DYNAMIC_SHAPES else "separate"


def merges_projections(device: str) -> bool:
    """Whether small matrices are worth merging: measured on the CPU only; GPUs do it themselves."""
    return kind(device) == "CPU"


def default_kv_type(core: ov.Core, device: str, *phases: Mapping[str, Any]) -> KVType:
    """The element type of KV slots by default: f16, but on the CPU f32, or bf16 if every phase computes in it."""
    if kind(device) != "CPU":
        return "f16"
    own = core.get_property(device, "INFERENCE_PRECISION_HINT")
    hints = [properties.get("INFERENCE_PRECISION_HINT", own) for properties in phases]
    names = {type_name(hint) for hint in hints}
    return "bf16" if names == {"bf16"} else "f32"

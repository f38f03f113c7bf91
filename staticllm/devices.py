"""Answers questions about a device before anything is compiled for it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from staticllm.core import KVType, ProgramMode
from staticllm.errors import DeviceError, last_line, shown

if TYPE_CHECKING:
    import openvino as ov

_OF_COMPILERS = frozenset(
    ["INFERENCE_PRECISION_HINT", "EXECUTION_MODE_HINT", "PERFORMANCE_HINT", "COMPILATION_NUM_THREADS", "NPU_PLATFORM",
     "NPU_COMPILER_TYPE", "NPU_COMPILATION_MODE_PARAMS", "NPU_TILES", "NPU_TURBO", "NPU_QDQ_OPTIMIZATION",
     "NPU_COMPILER_DYNAMIC_QUANTIZATION"]
)  # fmt: skip
"""Properties that a plugin lists only if a device or its compiler is present."""
DISTRIBUTING = ("AUTO", "MULTI", "HETERO", "BATCH")
"""OpenVINO's devices that choose among others."""
PREFERRED = ("NPU", "GPU", "CPU")
"""Devices that ``AUTO`` tries, in order."""
_NUMBER_AFTER = re.compile(r"\(\d+\)$")
_DYNAMIC_SHAPES = ("CPU", "GPU")
"""Devices that run bounded dynamic shapes well, and repack the weights for each compiled model."""


@cache
def get_core() -> ov.Core:
    """Return the only ``openvino.Core`` of this process, which is never released.

    With several, the CPU plugin may leave a freed stack registered for signal handlers: Ctrl-C kills the process (2026.4).
    """
    import openvino

    return openvino.Core()


def read_first_tensor() -> None:
    """Read a tensor, while a module is imported whose functions read tensors on several threads.

    The first ``Tensor.data`` of a process fills a table of the bindings and lets other threads run meanwhile. A thread that then
    reads a tensor waits for the table with the interpreter's lock, which the first one needs: a deadlock (OpenVINO 2026.4).
    """
    import numpy as np
    import openvino

    assert openvino.Tensor(np.zeros(1, np.int64)).data.size == 1


def kind(device: str) -> str:
    """Return the kind of a device: ``GPU`` of ``GPU.0``."""
    return device.split(".", maxsplit=1)[0]


def named_devices(text: str, available: Sequence[str]) -> list[str]:
    """Split ``"npu, cpu"`` into ``["NPU", "CPU"]``; of a device that distributes work, return those that it would use, in order.

    ``AUTO`` uses the listed devices (``AUTO:GPU,CPU``), or NPU, GPU and CPU without the excluded ones (``AUTO:-GPU``), as far as
    they are ``available``. ``HETERO``, ``MULTI`` and ``BATCH`` use the listed ones, whose number of requests or of texts
    (``MULTI:CPU(2)``) says nothing here.

    Raises:
        DeviceError: no device is listed, or every one is excluded.
    """
    prefix, _, rest = text.upper().partition(":")
    if prefix.strip() not in DISTRIBUTING:
        return [name.strip() for name in text.upper().split(",")]
    listed = [_NUMBER_AFTER.sub("", name.strip()) for name in rest.split(",") if name.strip()]
    named = [name for name in listed if not name.startswith("-")]
    if prefix.strip() != "AUTO":
        if not named:
            raise DeviceError(f"device {text!r}: name the devices, for example {prefix.strip()}:NPU,CPU")
        return named
    wanted = named or [name for name in PREFERRED if f"-{name}" not in listed]
    kinds = {kind(name) for name in available}
    if not wanted:
        raise DeviceError(f"device {text!r}: every device is excluded; there are: {', '.join(available)}")
    return [name for name in wanted if kind(name) in kinds] or wanted


def type_name(value: object) -> str:
    """Return the name of an element type, for example ``f32``, of OpenVINO's object or of a string."""
    name: str = getattr(value, "get_type_name", lambda: value if isinstance(value, str) else shown(value))()
    return name


def is_present(core: ov.Core, device: str) -> bool:
    """Return whether the device is on this machine: ``GPU`` or, of several, ``GPU.0``."""
    return any(device in (name, kind(name)) for name in core.available_devices)


def check_device(core: ov.Core, device: object) -> str:
    """Return the device's name in capitals if it is on this machine.

    Raises:
        DeviceError: the device is not on this machine; the message lists the devices that are.
    """
    available = core.available_devices
    name = device.upper() if isinstance(device, str) else ""
    if name and is_present(core, name):
        return name
    if not available:
        raise DeviceError(
            f"device {shown(device)} cannot be used: OpenVINO found no device at all, so its plugins are missing; "
            "an application made with PyInstaller must collect them (docs/desktop.md)"
        )
    raise DeviceError(f"device {shown(device)} is not on this machine; there are: {', '.join(available)}")


def check_known(core: ov.Core, device: object) -> str:
    """Return the device's name if it is on this machine, or is an NPU or GPU.

    The memory that a model would need on an NPU or GPU can be computed without one.

    Raises:
        DeviceError: the device is not on this machine, and is neither an NPU nor a GPU.
    """
    if isinstance(device, str) and kind(device) in ("NPU", "GPU"):
        return device
    return check_device(core, device)


def known_properties(core: ov.Core, device: str) -> frozenset[str]:
    """Return the names of the properties that the device accepts; if there is no such device, those known without one."""
    try:
        return supported_properties(core, device) | _OF_COMPILERS
    except RuntimeError:  # a plugin without a device
        return _OF_COMPILERS


def npu_compiler_problem(core: ov.Core) -> str:
    """Return why OpenVINO cannot compile for an NPU that is not on this machine; empty if it can.

    The NPU compiler is a library beside OpenVINO's plugins, which the wheels for Linux lack. This compiles a trivial model, and
    the error of the plugin names the missing library.
    """
    import openvino as ov
    from openvino import opset13 as ops

    value = ops.parameter([1, 1], ov.Type.f16)
    model = ov.Model([ops.relu(value)], [value])  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs
    try:
        core.compile_model(model, "NPU", {"NPU_COMPILER_TYPE": "PLUGIN", "NPU_PLATFORM": "4000"})
    except RuntimeError as error:
        library = re.search(r'Cannot load library "([^"]+)"', str(error))
        return f"{PurePath(library[1]).name} is missing beside OpenVINO's plugins" if library else last_line(error)
    return ""


def supported_properties(core: ov.Core, device: str) -> frozenset[str]:
    """Return the names of the properties that the device and OpenVINO's own core accept at compile time."""
    return frozenset(core.get_property(device, "SUPPORTED_PROPERTIES"))


def with_exact_f32(device: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties, with quantized activations switched off if they ask for f32 on a CPU.

    The CPU plugin would still quantize activations for int8 weights. Without that a decode step loses about a seventh of its
    speed, and its tokens equal those of the stateful model.
    """
    hint = properties.get("INFERENCE_PRECISION_HINT")
    is_f32 = type_name(hint) == "f32"
    exact = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if is_f32 and kind(device) == "CPU" else {}
    return {**exact, **properties}


def for_one_row(core: ov.Core, device: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties for a program of static shape with one row.

    OpenVINO 2026.4's CPU plugin fuses attention, and then computes it wrongly, mostly as NaN, if it is in bf16 and has one row of
    static shape (seen with AVX-512 BF16 without AMX). Programs of more rows, or of dynamic shape, are right.
    """
    if kind(device) != "CPU":
        return dict(properties)
    hint = properties.get("INFERENCE_PRECISION_HINT") or core.get_property(device, "INFERENCE_PRECISION_HINT")
    apart = {} if type_name(hint) == "f32" else {"SNIPPETS_MODE": "DISABLE"}
    return {**apart, **properties}


def default_mode(device: str) -> ProgramMode:
    """Return ``shared`` if dynamic shapes cost nothing and each program needs a copy of the weights, else ``separate``."""
    return "shared" if kind(device) in _DYNAMIC_SHAPES else "separate"


def merges_projections(device: str) -> bool:
    """Return whether small matrices are worth merging. This was measured on the CPU only; GPUs merge them themselves."""
    return kind(device) == "CPU"


def npu_platform(core: ov.Core, device: str) -> str:
    """Return the platform of an NPU, such as ``4000``; empty for other devices, and if its plugin does not say it."""
    if kind(device) != "NPU":
        return ""
    try:
        return str(core.get_property(device, "DEVICE_ARCHITECTURE")).upper().removeprefix("NPU")
    except RuntimeError:
        return ""


def default_kv_type(core: ov.Core, device: str, *phases: Mapping[str, Any]) -> KVType:
    """Return the default element type of KV slots: f16, but on the CPU f32, or bf16 if every phase computes in bf16."""
    if kind(device) != "CPU":
        return "f16"
    own = core.get_property(device, "INFERENCE_PRECISION_HINT")
    hints = [properties.get("INFERENCE_PRECISION_HINT", own) for properties in phases]
    names = {type_name(hint) for hint in hints}
    return "bf16" if names == {"bf16"} else "f32"

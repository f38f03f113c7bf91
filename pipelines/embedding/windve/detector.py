"""WINDVE's device detector: which devices embed texts together, in which order, and which of them are left out and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from staticllm.devices import DISTRIBUTING, kind
from staticllm.errors import ConfigError, DeviceError, shown

from .affinity import parse_list

ORDER = ("NPU", "GPU", "CPU")
"""Kinds of devices, the preferred first. Other kinds are used only if they are named."""


@dataclass(frozen=True)
class UsedDevice:
    """A device with one instance of the model and one queue."""

    name: str
    """Unique."""
    device: str
    """OpenVINO's name."""
    cores: tuple[int, ...] = ()
    """The logical processors of a group of cores; empty for the whole device."""


@dataclass(frozen=True)
class Detection:
    """The devices that are used, in order of preference, and a line for each one that is not."""

    devices: tuple[UsedDevice, ...]
    left_out: tuple[str, ...] = ()

    @property
    def is_heterogeneous(self) -> bool:
        """Whether several devices embed together."""
        return len(self.devices) > 1


def detect(available: Sequence[str], heterogeneous: bool = True) -> Detection:
    """Return the devices that the machine offers: NPU, GPUs, CPU. ``available`` holds OpenVINO's names.

    Without ``heterogeneous`` only the devices of the first kind are used. With devices of one kind it changes nothing.

    Raises:
        DeviceError: none of them is an NPU, a GPU or a CPU.
    """
    found = sorted(
        (name for name in available if kind(name) in ORDER), key=lambda name: (ORDER.index(kind(name)), name)
    )
    if not found:
        names = ", ".join(available) or "no device at all"
        raise DeviceError(f"OpenVINO found {names}, but no NPU, GPU or CPU: name the devices to use")
    used = [name for name in found if heterogeneous or kind(name) == kind(found[0])]
    left_out = [
        f"{name}: several kinds of devices are used only if HETEROGENEOUS is on" for name in found if name not in used
    ]
    return Detection(tuple(UsedDevice(name, name) for name in used), tuple(left_out))


def named(text: str, available: Sequence[str]) -> Detection:
    """Return the devices of a list like ``NPU,CPU`` or ``CPU#0-3,CPU#4-7``, in its order, which is that of preference.

    ``CPU#0-3`` is a group of logical processors with an instance of its own; several ranges are joined by ``+``.

    Raises:
        ConfigError: a device is named twice, or two groups share a processor.
        DeviceError: a device is not on this machine, or is one that distributes work itself, such as ``AUTO``.
    """
    devices = [_parse(part.strip(), available) for part in text.split(",") if part.strip()]
    if not devices:
        raise ConfigError(f"devices {shown(text)}: name one or more, for example NPU,CPU")
    taken: dict[int, str] = {}
    for index, used in enumerate(devices):
        same = [
            other for other in devices[:index] if _actual(other.device, available) == _actual(used.device, available)
        ]
        if any(not (used.cores and other.cores) for other in same):
            name, other = (each.name.split("#")[0] for each in (used, same[0]))
            also = "" if name == other else f", as {other}"
            raise ConfigError(
                f"devices {shown(text)}: {name} is used twice{also}; one device has one instance of the model"
            )
        for core in used.cores:
            if core in taken:
                raise ConfigError(f"devices {shown(text)}: {taken[core]} and {used.name} share processor {core}")
            taken[core] = used.name
    return Detection(tuple(devices))


def with_other_kinds(devices: Sequence[UsedDevice], available: Sequence[str]) -> tuple[UsedDevice, ...]:
    """Return named devices and those of other kinds that the machine offers, which come after them but before CPUs at the end.

    A CPU is last unless the list names an NPU or a GPU after it: of Algorithm 1's two devices it is the one that helps.
    """
    kinds = {kind(used.device) for used in devices}
    more = [used for used in detect(available).devices if kind(used.device) not in kinds]
    end = len(devices)
    while end and kind(devices[end - 1].device) == "CPU":
        end -= 1
    before = [used for used in more if kind(used.device) != "CPU"]
    after = [used for used in more if kind(used.device) == "CPU"]
    return (*devices[:end], *before, *devices[end:], *after)


def without_slow_cpu(found: Detection, limit_s: float, seconds_of_one: Callable[[UsedDevice], float]) -> Detection:
    """Return the detection without CPUs that cannot embed one query within the limit (equation 11), unless nothing else is left.

    ``seconds_of_one`` measures one query on a device, seconds.
    """
    if not found.is_heterogeneous:
        return found
    devices = []
    left_out = list(found.left_out)
    for used in found.devices:
        seconds = seconds_of_one(used) if kind(used.device) == "CPU" else 0.0
        if seconds <= limit_s:
            devices.append(used)
        else:
            left_out.append(f"{used.name}: one query takes {seconds:.3g} s, the limit is {limit_s:.3g} s")
    return Detection(tuple(devices), tuple(left_out)) if devices else found


def _parse(name: str, available: Sequence[str]) -> UsedDevice:
    device, _, cores = name.partition("#")
    device = device.upper()
    if device.split(":")[0] in DISTRIBUTING:
        raise DeviceError(
            f"device {shown(name)}: {device.split(':')[0]} distributes work itself: name devices, for example NPU,CPU"
        )
    actual = _actual(device, available)
    if actual is None:
        raise DeviceError(f"device {shown(device)} is not on this machine; there are: {', '.join(available) or 'none'}")
    if "#" not in name:
        return UsedDevice(device, device if device in available or device == kind(device) else actual)
    numbers = parse_list(cores.replace("+", ","))
    if kind(device) != "CPU" or not numbers:
        raise ConfigError(
            f"device {shown(name)}: a group of cores is CPU#FIRST-LAST, for example CPU#0-3 or CPU#0-1+4-5"
        )
    return UsedDevice(f"{device}#{cores}", device, tuple(sorted(numbers)))


def _actual(device: str, available: Sequence[str]) -> str | None:
    """Return OpenVINO's name of a device: of ``GPU`` the first in ``available``, of ``GPU.0`` a single ``GPU``; None if none."""
    if device in available:
        return device
    alike = sorted(name for name in available if kind(name) == kind(device))
    if device == kind(device):
        return alike[0] if alike else None
    return alike[0] if device == f"{kind(device)}.0" and alike == [kind(device)] else None

"""What a pool is made of: the properties that the user gave, the devices, and what each of them loads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from staticllm.config import one_of, switch
from staticllm.devices import PREFERRED, get_core, kind
from staticllm.errors import ConfigError, shown
from staticllm.properties import DEVICE_PROPERTIES, as_number, properties_by_device, with_own

from ...launch.genai_properties import plain_properties
from ..encoder_kind import EncoderChoices
from ..windve import detector
from ..windve.affinity import instance_cores, read_topology, unsupported
from ..windve.detector import Detection, UsedDevice

PolicyName = Literal["plain", "predicted", "windve", "windve_q"]
DEPTHS_NAME = "queue_depths.json"
"""The file of queue depths in ``CACHE_DIR``."""


@dataclass(frozen=True)
class PoolOptions:
    """The properties of a pipeline on several devices; docs/embeddings.md describes them."""

    is_heterogeneous: bool = False
    limit_s: float | None = None
    policy: PolicyName | None = None
    """None for ``predicted`` with a latency limit (seconds), and for ``plain`` without."""
    depths: Path | None = None
    device_properties: Mapping[str, Mapping[str, object]] | None = None
    is_apart: bool = False

    @property
    def policy_name(self) -> PolicyName:
        return self.policy or ("plain" if self.limit_s is None else "predicted")

    @property
    def needs_pool(self) -> bool:
        """Whether even one device is served by a pool."""
        return self.is_heterogeneous or self.is_apart or self.limit_s is not None


def _limit(value: object) -> float | None:
    limit = as_number(value)
    if limit is None:
        return None
    if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not 0 < limit <= sys.float_info.max:
        raise ConfigError(f"LATENCY_MS={shown(limit)}: must be a number of ms above 0, or None for no limit")
    return float(limit) / 1e3


def _policy(value: object) -> object:
    return one_of("QUEUE_POLICY", value, (None, *get_args(PolicyName)))


def _depths(value: object) -> Path | None:
    if value is not None and not isinstance(value, (str, Path)):
        raise ConfigError(f"QUEUE_DEPTHS={shown(value)}: must be the path of a file")
    return None if value is None else Path(value)


def _by_device(value: object) -> Mapping[str, Mapping[str, object]] | None:
    given = plain_properties({DEVICE_PROPERTIES: value})[DEVICE_PROPERTIES]
    return None if given is None else properties_by_device(given)


_FIELDS: Mapping[str, tuple[str, Callable[[object], Any]]] = {
    "HETEROGENEOUS": ("is_heterogeneous", partial(switch, "HETEROGENEOUS")),
    "LATENCY_MS": ("limit_s", _limit),
    "QUEUE_POLICY": ("policy", _policy),
    "QUEUE_DEPTHS": ("depths", _depths),
    DEVICE_PROPERTIES: ("device_properties", _by_device),
    "SEPARATE_PROCESS": ("is_apart", partial(switch, "SEPARATE_PROCESS")),
}
"""Property -> the field of ``PoolOptions``, and what makes its value."""
POOL_PROPERTIES = tuple(_FIELDS)
"""The properties that ``take_options`` takes."""


def take_options(properties: dict[str, object]) -> PoolOptions:
    """Remove the properties of a pool from ``properties``, and return them.

    Raises:
        ConfigError: a value is impossible.
    """
    given = [name for name in _FIELDS if name in properties]  # None is a value, and not one of a switch
    found = PoolOptions(**{field: parsed(properties.pop(name)) for name in given for field, parsed in [_FIELDS[name]]})
    if found.policy not in (None, "plain") and found.limit_s is None:
        raise ConfigError(f"QUEUE_POLICY={shown(found.policy)} needs a latency limit: give LATENCY_MS")
    if found.depths is not None and found.policy not in ("windve", "windve_q"):
        raise ConfigError(
            f"QUEUE_DEPTHS={shown(str(found.depths))} with QUEUE_POLICY={found.policy_name!r}, which has no depths: leave it "
            "out, or set QUEUE_POLICY='windve' or 'windve_q'"
        )
    if found.depths is None and isinstance(folder := properties.get("CACHE_DIR"), (str, Path)) and folder:
        return replace(found, depths=Path(folder) / DEPTHS_NAME)
    return found


def needs_pool(device: str, options: PoolOptions) -> bool:
    """Return whether texts are embedded by a pool: on several devices or core groups, with a latency limit, or apart."""
    return options.needs_pool or any(mark in device for mark in ",#")


@dataclass(frozen=True)
class PoolPlan:
    """The devices of a pool, in order of preference, and the choices of each by its name."""

    detection: Detection
    choices: Mapping[str, EncoderChoices]
    is_apart: bool = False
    """Whether every device has a worker process."""
    named: str = ""
    """The device that the user named first, which an engine that was given serves."""

    @property
    def devices(self) -> tuple[UsedDevice, ...]:
        """The devices, in order of preference."""
        return self.detection.devices

    @property
    def names(self) -> list[str]:
        return [used.name for used in self.devices]


def plan_pool(device: str, choices: EncoderChoices, options: PoolOptions) -> PoolPlan:
    """Return the plan of a pool on ``device``, which may name several.

    Raises:
        ConfigError, DeviceError: as for ``devices_of`` and ``choices_by_device``.
    """
    found = devices_of(device, options.is_heterogeneous, get_core().available_devices)
    names = [used.name for used in found.devices]
    named = detector.named(device, get_core().available_devices).devices[0].name
    return PoolPlan(found, choices_by_device(choices, options, names), options.is_apart, named)


def devices_of(device: str, is_heterogeneous: bool, available: Sequence[str]) -> Detection:
    """Return the devices that embed together: the named ones, and with ``is_heterogeneous`` those of other kinds.

    ``with_other_kinds`` says where these stand: ``CPU``, the default, becomes NPU, GPU, CPU. A CPU beside other devices gets the
    cores that WINDVE's rules leave to it, where threads can be bound to cores.

    Raises:
        ConfigError, DeviceError: as for ``named``.
    """
    found = detector.named(device, available)
    if is_heterogeneous:
        found = replace(found, devices=detector.with_other_kinds(found.devices, available))
    if found.is_heterogeneous and not unsupported():
        found = replace(found, devices=tuple(map(_with_cores, found.devices)))
    return found


def _with_cores(used: UsedDevice) -> UsedDevice:
    if kind(used.device) != "CPU" or used.cores:
        return used
    groups = instance_cores(read_topology())
    return replace(used, cores=tuple(groups[0])) if groups else used


def choices_by_device(choices: EncoderChoices, options: PoolOptions, names: Sequence[str]) -> dict[str, EncoderChoices]:
    """Return the choices of each device, with its own properties in them (``DEVICE_PROPERTIES``).

    Those of ``CPU`` are also those of ``CPU#0-3``. Those of an NPU, GPU or CPU that is not used are left out.

    Raises:
        ConfigError: there are properties of something else.
    """
    own = options.device_properties or {}
    unknown = [name for name in own if name not in names and name.split(".")[0] not in PREFERRED]
    if unknown:
        raise ConfigError(
            f"DEVICE_PROPERTIES for {shown(min(unknown))}: there is no such device here; there are: {', '.join(names)}"
        )
    given = {**(choices.properties or {}), DEVICE_PROPERTIES: own}
    each = {name: {**with_own(given, name.split("#", maxsplit=1)[0]), **own.get(name, {})} for name in names}
    return {name: replace(choices, properties=found or None) for name, found in each.items()}

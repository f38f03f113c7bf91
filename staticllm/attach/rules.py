"""Which models go to the daemon; whatever it could not serve as OpenVINO does stays in the program."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from .ghost import GhostError, check_ports
from .settings import Settings

MAX_PROPERTIES = 64
IGNORED = frozenset(["ENABLE_MMAP", "FORCE_TBB_TERMINATE"])
"""Properties of a ``Core`` that have no meaning for one compilation."""
PATHS = frozenset(["CACHE_DIR", "WEIGHTS_PATH"])
"""Properties that are paths: made absolute, because the daemon has another working directory."""


class NativeError(Exception):
    """A model that is not taken. ``is_silent`` is true if the user has asked for that."""

    def __init__(self, reason: str, is_silent: bool = False) -> None:
        super().__init__(reason)
        self.is_silent = is_silent


def check_caller(settings: Settings) -> None:
    """Check that this call may be taken at all.

    Raises:
        NativeError: attaching is off, or staticllm itself compiles its step programs.
    """
    if settings.mode == "off" or os.environ.get("STATICLLM_ATTACH") == "off":
        raise NativeError("STATICLLM_ATTACH=off", is_silent=True)
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("openvino.", "_staticllm_client.")):
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    if name.startswith("staticllm.") and not name.startswith("staticllm.attach."):
        raise NativeError("staticllm has its own way to the daemon", is_silent=True)


def check_device(device: str, available: list[str], settings: Settings) -> None:
    """Check that all devices that a device name can mean go to the daemon.

    Raises:
        NativeError: one of them does not.
    """
    if not settings.devices:
        return
    kind, _, listed = device.upper().partition(":")
    names = listed or ("" if kind in ("AUTO", "HETERO", "MULTI", "BATCH") else kind)
    meant = [name.strip("-() ") for name in names.split(",") if name.strip()] or [name.upper() for name in available]
    for name in meant:
        if name.partition("(")[0] not in settings.devices and name.partition(".")[0] not in settings.devices:
            raise NativeError(f"the device {name} is not one of STATICLLM_ATTACH_DEVICES", is_silent=True)


def check_model(model: Any) -> None:
    """Check that the daemon and the ghost can have a model.

    Raises:
        NativeError: it has ports or operations that they cannot have.
    """
    try:
        check_ports(model)
    except GhostError as error:
        raise NativeError(str(error)) from error
    for node in model.get_ops():
        info = node.get_type_info()
        if not info.version_id.startswith("opset"):
            raise NativeError(f"the custom operation {info.name}, which the daemon does not know")


def plain_config(config: dict[str, Any]) -> dict[str, str | int | float | bool]:
    """Return the properties of a compilation as values of JSON.

    Raises:
        NativeError: one of them is an object without such a value.
    """
    plain = {}
    for name, value in config.items():
        if name in IGNORED:
            continue
        plain[str(name)] = _plain(str(name), value)
    if len(plain) > MAX_PROPERTIES:
        raise NativeError(f"{len(plain)} properties, the daemon takes {MAX_PROPERTIES}")
    return plain


def _plain(name: str, value: Any) -> str | int | float | bool:
    if isinstance(value, os.PathLike) or (name in PATHS and isinstance(value, str) and value):
        return str(Path(value).absolute())
    if isinstance(value, (str, int, float, bool)):
        return value
    if type(value).__module__.split(".")[0] == "openvino":
        if hasattr(value, "get_type_name"):
            return str(value.get_type_name())
        if isinstance(getattr(value, "name", None), str):
            return str(value.name)
    raise NativeError(f"the property {name}, whose value is a {type(value).__name__}")

"""`Core.compile_model` of an attached program: the model goes to the daemon, or the reason why not is said once.

Whatever the daemon could not serve as OpenVINO does stays in the program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openvino._ov_api import Core, Model

from .client import Client, DaemonGoneError, UnavailableError
from .model_origin import NativeOrigin, native_origin_of
from .placeholder import PortError, check_ports, compile_placeholder
from .proxies import AttachedCompiledModel
from .remote_model import RemoteModel, say_once
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
        NativeError: attaching is off, or staticllm itself calls.
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
        NativeError: one is not among ``STATICLLM_ATTACH_DEVICES``.
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
    """Check that the daemon and the placeholder can have a model.

    Raises:
        NativeError: a port or a custom operation is unknown to them.
    """
    try:
        check_ports(model)
    except PortError as error:
        raise NativeError(str(error)) from error
    for node in model.get_ops():
        info = node.get_type_info()
        if not info.version_id.startswith("opset"):
            raise NativeError(f"the custom operation {info.name}, which the daemon does not know")


def plain_config(config: dict[str, Any]) -> dict[str, str | int | float | bool]:
    """Return the properties of a compilation as values of JSON.

    Raises:
        NativeError: a value cannot be sent, or there are too many.
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


Native = Callable[..., Any]


def compile_attached(
    client: Client, native: Native, core: Any, model: Any, device: str | None, config: dict[str, Any], weights: Any
) -> AttachedCompiledModel | None:
    """Return a model that the daemon serves; None if it must be compiled natively.

    Args:
        client: The program's connection.
        native: The original ``Core.compile_model``.
        core: The program's ``Core``.
        model: A model or a path, as the program gave it.
        device: The name of the device; None for ``AUTO``.
        config: The properties of this compilation.
        weights: Weights in memory, or None.

    Raises:
        RuntimeError: the model is not taken, and ``STATICLLM_ATTACH=require``.
    """
    try:
        check_caller(client.settings)
        device = device or "AUTO"
        check_device(device, core.available_devices, client.settings)
        plain = plain_config({**_core_properties(core, device), **config})
        if weights is not None:
            raise NativeError("weights in memory beside a model file")
        read = _read(core, model)
        check_model(read)
        origin = native_origin_of(read, device, plain, client.settings.is_exact)
    except NativeError as error:
        _refuse(client, str(error), error.is_silent)
        return None
    except (OSError, RuntimeError, TypeError) as error:  # natively it fails in its own way, or not at all
        lines = str(error).strip().splitlines() or [type(error).__name__]
        _refuse(client, lines[-1], False)
        return None
    return _take(client, native, core, read, origin)


def _take(client: Client, native: Native, core: Any, model: Any, origin: NativeOrigin) -> AttachedCompiledModel | None:
    names = [frozenset(port.get_names()) for port in model.inputs]
    try:
        placeholder = compile_placeholder(model)
        device = origin.device
        config = dict(origin.config)
        files = (str(origin.xml), str(origin.weights))
        request = RemoteModel(client, origin, names, lambda: _compile_files(native, core, files, device, config))
    except (UnavailableError, DaemonGoneError, RuntimeError, ValueError) as error:
        origin.close()
        _refuse(client, str(error), False)
        return None
    except BaseException:
        origin.close()
        raise
    return AttachedCompiledModel(placeholder, request)


def _compile_files(native: Native, core: Any, files: tuple[str, str], device: str, config: dict[str, Any]) -> Any:
    xml, weights = files
    model = Core.read_model(core, xml, weights) if os.path.isfile(weights) else Core.read_model(core, xml)  # noqa: PTH113
    return native(core, model, device, config)


def _read(core: Any, model: Any) -> Any:
    if isinstance(model, Model):
        return model
    if not isinstance(model, (str, os.PathLike)):
        raise NativeError(f"a model of the type {type(model).__name__}")
    return core.read_model(model)


def _core_properties(core: Any, device: str) -> dict[str, Any]:
    """Return what the program has set for the device with ``Core.set_property``."""
    found: dict[str, Any] = {}
    for name, values in getattr(core, "_staticllm_properties", ()):
        if name is None or name.upper() == device.upper():
            found.update(values)
    return found


def _refuse(client: Client, reason: str, is_silent: bool) -> None:
    if is_silent:
        return
    if client.settings.mode == "require":
        raise RuntimeError(f"the daemon does not serve this model: {reason} (STATICLLM_ATTACH=require)")
    say_once(f"{reason}: the model runs natively in this program")

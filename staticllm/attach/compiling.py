"""`Core.compile_model` of an attached program: the model goes to the daemon, or the reason why not is said once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from openvino._ov_api import Core, Model

from .answers import DaemonGoneError, UnavailableError
from .client import Client
from .far_model import FarModel, say_once
from .ghost import compile_ghost
from .model_source import ModelSource, source_of
from .proxies.compiled_model import AttachedCompiledModel
from .rules import NativeError, check_caller, check_device, check_model, plain_config

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
        source = source_of(read, device, plain, client.settings.is_exact)
    except NativeError as error:
        _refuse(client, str(error), error.is_silent)
        return None
    except (OSError, RuntimeError, TypeError) as error:  # natively it fails in its own way, or not at all
        lines = str(error).strip().splitlines() or [type(error).__name__]
        _refuse(client, lines[-1], False)
        return None
    return _take(client, native, core, read, source)


def _take(client: Client, native: Native, core: Any, model: Any, source: ModelSource) -> AttachedCompiledModel | None:
    names = [frozenset(port.get_names()) for port in model.inputs]
    try:
        ghost = compile_ghost(model)
        device, config, files = source.device, dict(source.config), (str(source.xml), str(source.weights))
        far = FarModel(client, source, names, lambda: _compile_files(native, core, files, device, config))
    except (UnavailableError, DaemonGoneError, RuntimeError, ValueError) as error:
        source.close()
        _refuse(client, str(error), False)
        return None
    except BaseException:
        source.close()
        raise
    return AttachedCompiledModel(ghost, far)


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

"""Replaces the few functions of OpenVINO's Python classes through which a program compiles models."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from .settings import Settings, SettingsError, check_priority, read_settings
from .startup import sitecustomize

MODULE = "openvino._ov_api"


def attach(module: Any) -> None:
    """Attach this program, which has imported ``openvino._ov_api``. A second call does nothing.

    Raises:
        SettingsError: an environment variable has a value that is not allowed.
    """
    settings = read_settings()
    if settings.mode != "off":
        patch(module, settings)


def watch() -> None:
    """Change the other modules that concern us: now if they were imported, else when they are.

    A program that imports this package itself has no start-up hook that would do so.
    """
    package = __name__.rpartition(".")[0]
    finder = sitecustomize.Finder(__name__.rpartition(".")[0])
    for name in sitecustomize.WATCHED:
        if (module := sys.modules.get(name)) is not None:
            sitecustomize.change(module, package)
    sys.meta_path.insert(0, finder)


def install() -> None:
    """Attach this program. A second call does nothing.

    Raises:
        ImportError: OpenVINO cannot be imported.
        SettingsError: a setting has an impossible value.
    """
    settings = read_settings()
    if settings.mode == "off":
        return
    patch(importlib.import_module(MODULE), settings)


def patch(api: Any, settings: Settings) -> None:
    """Replace the functions of ``openvino._ov_api``, which has been imported."""
    if hasattr(api.Core, "_staticllm_client"):
        return
    from .client import Client

    client = Client(settings)
    api.Core._staticllm_client = client
    _patch_core(api.Core, client)
    _patch_queue(api.AsyncInferQueue)


def set_priority(priority: int) -> None:
    """Set the priority of this program's calls in the daemon, from -100 to 100.

    Raises:
        ValueError: it is not from -100 to 100.
        RuntimeError: the program is not attached.
    """
    check_priority(priority)
    client = getattr(getattr(sys.modules.get(MODULE), "Core", None), "_staticllm_client", None)
    if client is None:
        raise RuntimeError("this program is not attached: import openvino and staticllm.attach first")
    os.environ["STATICLLM_ATTACH_PRIORITY"] = str(priority)  # of pipelines and programs that it starts from now on
    client.set_priority(priority)


def _patch_core(core: Any, client: Any) -> None:
    compile_native = core.compile_model
    read_native = core.read_model
    set_native = core.set_property

    def compile_model(
        self: Any, model: Any, device_name: Any = None, config: Any = None, *, weights: Any = None
    ) -> Any:
        from .compiling import compile_attached

        taken = compile_attached(client, compile_native, self, model, device_name, config or {}, weights)
        if taken is not None:
            return taken
        return compile_native(self, model, device_name, config, weights=weights)

    def read_model(self: Any, model: Any, weights: Any = None, config: Any = None) -> Any:
        from .model_origin import maps_weights, origin_of

        read = read_native(self, model, weights, config)
        origin = origin_of(read, model, weights, maps_weights(self, config or {}))
        if origin is not None:
            read._staticllm_origin = origin
        return read

    def set_property(self: Any, *args: Any, **kwargs: Any) -> None:
        set_native(self, *args, **kwargs)
        given = (*args, *kwargs.values())
        device = next((each for each in given if isinstance(each, str)), None)
        values = next(each for each in given if not isinstance(each, str))
        if not hasattr(self, "_staticllm_properties"):
            self._staticllm_properties = []
        self._staticllm_properties.append((device, dict([values] if isinstance(values, tuple) else values)))

    for name, function in (
        ("compile_model", compile_model),
        ("read_model", read_model),
        ("set_property", set_property),
    ):
        function.__doc__ = getattr(core, name).__doc__
        setattr(core, name, function)


def _patch_queue(queue: Any) -> None:
    def new(cls: Any, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cls is queue and type(model).__name__ == "AttachedCompiledModel":
            from .infer_queue import AttachedInferQueue

            return super(queue, AttachedInferQueue).__new__(AttachedInferQueue)
        return super(queue, cls).__new__(cls)

    queue.__new__ = new


__all__ = ["SettingsError", "install", "patch", "set_priority"]

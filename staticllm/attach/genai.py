"""Makes ``openvino_genai.LLMPipeline`` of an attached program a client of the daemon; sampling stays in the daemon."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

from .settings import Settings, read_settings


def attach(module: Any) -> None:
    """Replace the pipeline of ``openvino_genai``, which has been imported. A second call does nothing.

    Raises:
        SettingsError: an environment variable has a value that is not allowed.
    """
    settings = read_settings()
    if settings.mode != "off" and not isinstance(module.LLMPipeline, AttachedType):
        module.LLMPipeline = AttachedType("LLMPipeline", (), {"native": module.LLMPipeline, "settings": settings})
        for owner, name in ((module, "draft_model"), (module.Adapter, "__init__"), (module.AdapterConfig, "__init__")):
            _import_before(owner, name)


def _import_before(owner: Any, name: str) -> None:
    """Import staticllm when a function of ``owner`` is first called, because it notes the arguments from then on.

    GenAI's draft models and adapters do not tell from which files they were made, so the daemon would not learn it.
    """
    native = getattr(owner, name)

    @functools.wraps(native)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(owner, name) is call:
            setattr(owner, name, native)
            with contextlib.suppress(Exception):  # then the pipeline runs natively, and says why
                _pipeline_type()
        return getattr(owner, name)(*args, **kwargs)

    setattr(owner, name, call)


class AttachedType(type):
    """The class of ``LLMPipeline``: a call returns a pipeline of the daemon, or the native one if the daemon does not take it."""

    native: Any
    settings: Settings

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct a pipeline with the arguments of GenAI's.

        Raises:
            Exception: with ``require``, whatever kept the daemon from taking the model; else what GenAI raises.
        """
        devices = cls.settings.devices
        device = kwargs.get("device", next((each for each in args[1:3] if isinstance(each, str)), "CPU"))
        if devices and str(device).upper() not in devices:
            return cls.native(*args, **kwargs)
        try:
            return _pipeline_type()(*args, daemon=True, **kwargs)
        except Exception as error:
            if cls.settings.mode == "require":
                raise
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            warnings.warn(f"staticllm attach: {lines[-1]}: LLMPipeline runs natively", RuntimeWarning, stacklevel=2)
        return cls.native(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return whether an object is a pipeline of the daemon or a native one."""
        return isinstance(instance, cls.native) or type(instance).__name__ == "StaticLLMPipeline"

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.native, name)


def _pipeline_type() -> Any:
    """Return ``StaticLLMPipeline``, of the program's own environment or of ours.

    Raises:
        ImportError: a package that it needs is missing in the program's environment.
    """
    try:
        return importlib.import_module("staticllm").StaticLLMPipeline
    except ModuleNotFoundError as error:
        if error.name != "staticllm":
            raise
    folder = str(Path(__file__).resolve().parents[2])
    sys.path.append(folder)  # at the end: the program's own packages go first
    return importlib.import_module("staticllm").StaticLLMPipeline

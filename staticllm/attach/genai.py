"""Makes pipelines of ``openvino_genai`` in an attached program clients of the daemon; sampling stays in the daemon."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .settings import Settings, read_settings

OURS = {"LLMPipeline": "StaticLLMPipeline", "WhisperPipeline": "StaticWhisperPipeline"}
"""The pipelines of GenAI that are replaced, and our class for each."""


def attach(module: Any) -> None:
    """Replace the pipelines of ``openvino_genai``, which has been imported. A second call does nothing.

    Raises:
        SettingsError: an environment variable has a value that is not allowed.
    """
    settings = read_settings()
    if settings.mode == "off" or isinstance(module.LLMPipeline, AttachedType):
        return
    for name, ours in OURS.items():
        if (native := getattr(module, name, None)) is not None:  # an older GenAI has fewer
            setattr(module, name, _attached(native, name, ours, settings))
    for owner, name in ((module, "draft_model"), (module.Adapter, "__init__"), (module.AdapterConfig, "__init__")):
        _import_before(owner, name)


def _attached(native: Any, name: str, ours: str, settings: Settings) -> Any:
    """Return the class that takes the place of a native one."""
    names = {
        "native": native,
        "ours": ours,
        "settings": settings,
        "base": _base_of(native, settings),
        "__init__": native.__init__,
    }
    return AttachedType(name, (), names)


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
                _our_class(OURS["LLMPipeline"])
        return getattr(owner, name)(*args, **kwargs)

    setattr(owner, name, call)


def _is_for_daemon(settings: Settings, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a pipeline with these arguments is on a device whose models the daemon may take."""
    device = kwargs.get("device", next((each for each in args[1:3] if isinstance(each, str)), "CPU"))
    return not settings.devices or str(device).upper() in settings.devices


def _base_of(native: Any, settings: Settings) -> Any:
    """Return the base of the program's own classes of pipelines, which run natively and say so."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if _is_for_daemon(settings, args, kwargs):
            text = f"{type(self).__name__} derives from {native.__name__}, and the daemon has no such class"
            if settings.mode == "require":
                raise RuntimeError(text)
            warnings.warn(f"staticllm attach: {text}: it runs natively", RuntimeWarning, stacklevel=2)
        native.__init__(self, *args, **kwargs)

    return type(native)(native.__name__, (native,), {"__init__": init, "__module__": native.__module__})


class AttachedType(type):
    """The class of a pipeline: a call returns one of the daemon, or the native one if the daemon does not take it."""

    native: Any
    ours: str
    """The name of our class. A class that derives from it derives from the native one instead, so that it has its own
    methods."""
    base: Any
    settings: Settings

    def __new__(cls, name: str, bases: tuple[Any, ...], names: dict[str, Any], **kwargs: Any) -> Any:
        """Return a class; a native one if it derives from an attached one."""
        real = tuple(base.base if isinstance(base, AttachedType) else base for base in bases)
        if real != bases:
            return types.new_class(name, real, kwargs, lambda namespace: namespace.update(names))
        return super().__new__(cls, name, bases, names)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct a pipeline with the arguments of GenAI's.

        Raises:
            Exception: with ``require``, whatever kept the daemon from taking the model; else what GenAI raises.
        """
        if not _is_for_daemon(cls.settings, args, kwargs):
            return cls.native(*args, **kwargs)
        try:
            return _our_class(cls.ours)(*args, daemon=True, **kwargs)
        except Exception as error:
            if cls.settings.mode == "require":
                raise
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            warnings.warn(f"staticllm attach: {lines[-1]}: {cls.__name__} runs natively", RuntimeWarning, stacklevel=2)
        return cls.native(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return whether an object is a pipeline of the daemon or a native one."""
        return isinstance(instance, cls.native) or type(instance).__name__ == cls.ours

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Return whether a class is this one, or derives from the native one."""
        return type.__subclasscheck__(cls, subclass) or issubclass(subclass, cls.native)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.native, name)


def _our_class(name: str) -> Any:
    """Return a class of staticllm, of the program's own environment or of ours. Raises ``ImportError``."""
    try:
        return getattr(importlib.import_module("staticllm"), name)
    except ModuleNotFoundError as error:
        if error.name != "staticllm":
            raise
    folder = str(Path(__file__).resolve().parents[2])
    sys.path.append(folder)  # at the end: the program's own packages go first
    return getattr(importlib.import_module("staticllm"), name)

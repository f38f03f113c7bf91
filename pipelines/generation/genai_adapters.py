"""Finds out which files the adapters of openvino_genai hold: its objects do not tell, so their construction is watched.

From the first import of this module on, ``openvino_genai.Adapter(...)`` and ``AdapterConfig(...)`` note their arguments. A config
gives back copies of adapters, and a copy is recognised by GenAI itself: ``AdapterConfig.get_alpha`` compares what is behind them.
``Adapter`` of this module is GenAI's class, for which it also takes the directories that PEFT writes.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import openvino as ov
import openvino_genai as genai

from staticllm.adapters.adapter_set import MAX_ALPHA, AdapterSet, AdapterUse
from staticllm.adapters.lora import FILE, LoraAdapter, adapter_in_memory, read_adapter
from staticllm.errors import AdapterError, ConfigError, last_line, quoted, shown

MAX_KNOWN = 1024
"""Adapters that are known at a time; when more are made, the oldest ones are forgotten."""
_FUSED = (genai.AdapterConfig.Mode.MODE_FUSE,)
_MODES: WeakKeyDictionary[genai.AdapterConfig, Any] = WeakKeyDictionary()
_LOCK = threading.Lock()


@dataclass
class KnownAdapter:
    """An adapter object of GenAI, and where its numbers come from."""

    handle: genai.Adapter
    file: Path | bytes
    name: str = ""
    """"" until they were read."""

    def read(self) -> LoraAdapter:
        """Read the numbers.

        Raises:
            AdapterError: the file is missing, damaged or impossible, or no LoRA adapter.
        """
        adapter = adapter_in_memory(self.file) if isinstance(self.file, bytes) else read_adapter(self.file)
        self.name = adapter.name
        return adapter

    def is_same(self, other: genai.Adapter) -> bool:
        """Return whether another object of GenAI is this adapter, or a copy of it."""
        try:
            genai.AdapterConfig(self.handle).get_alpha(other)
        except RuntimeError:
            return False
        return True


AdapterConfig = genai.AdapterConfig
_KNOWN: deque[KnownAdapter] = deque(maxlen=MAX_KNOWN)
# in an attached program, these functions are wrapped
_native_adapter_init = getattr(genai.Adapter.__init__, "__wrapped__", genai.Adapter.__init__)
_native_config_init = getattr(genai.AdapterConfig.__init__, "__wrapped__", genai.AdapterConfig.__init__)


class Adapter(genai.Adapter):  # type: ignore[misc]
    """A LoRA adapter for ``adapters=AdapterConfig(...)``, in place of ``openvino_genai.Adapter``.

    Args:
        path: A safetensors file, whose matrices are multiplied by the alpha of the request alone, as in GenAI. Or a directory as
            PEFT writes it, where ``lora_alpha`` and ``r`` of its ``adapter_config.json`` count too, so that 1 gives what PEFT
            computes. Or the bytes of a file in an ``openvino.Tensor``.

    Raises:
        AdapterError: the file is missing, damaged or impossible, or no LoRA adapter.
    """

    def __init__(self, path: str | os.PathLike[str] | ov.Tensor) -> None:
        if isinstance(path, ov.Tensor):
            super().__init__(path)
            return
        adapter = read_adapter(path)  # first, because GenAI's reader trusts the file
        file = Path(os.fsdecode(path))
        try:
            _native_adapter_init(self, file / FILE if file.is_dir() else file)
        except RuntimeError as error:
            raise AdapterError(f"openvino_genai cannot read {quoted(file)}: {last_line(error)}") from None
        _remember(KnownAdapter(self, file, adapter.name))


def adapter_set_of(config: object) -> AdapterSet | None:
    """Read the adapters of an ``AdapterConfig``; None if it has none.

    Raises:
        ConfigError: it is something else, or an alpha is not finite.
        AdapterError: an adapter is unknown, or its file is missing, damaged or impossible.
    """
    if not isinstance(config, genai.AdapterConfig):
        raise ConfigError(f"adapters is a {type(config).__name__}: must be an openvino_genai.AdapterConfig")
    members = [(known.read(), alpha) for known, alpha in _members(config)]
    return AdapterSet.of(members, _MODES.get(config) in _FUSED, config) if members else None


def adapter_uses(config: object) -> tuple[AdapterUse, ...] | None:
    """Return names and alphas of the adapters of a request; None if it leaves the choice to the pipeline.

    Raises:
        ConfigError: ``config`` is neither None nor an ``AdapterConfig``, or an alpha is not finite.
        AdapterError: an adapter is unknown, or its file is missing or damaged.
    """
    if config is None:
        return None
    if not isinstance(config, genai.AdapterConfig):
        raise ConfigError(
            f"adapters={shown(config)}: must be an openvino_genai.AdapterConfig, or None for the pipeline's own"
        )
    return tuple((known.name or known.read().name, alpha) for known, alpha in _members(config))


def _members(config: genai.AdapterConfig) -> list[tuple[KnownAdapter, float]]:
    found = []
    for adapter, alpha in config.get_adapters_and_alphas():
        if not abs(alpha) <= MAX_ALPHA:
            raise ConfigError(f"alpha={alpha}: must be a finite number, at most {MAX_ALPHA:g}")
        found.append((_known(adapter), float(alpha)))
    return found


def _known(adapter: genai.Adapter) -> KnownAdapter:
    """Return what is known about an adapter.

    Raises:
        AdapterError: nothing.
    """
    if not adapter:
        raise AdapterError("an Adapter() without a file: give the path of a safetensors file")
    with _LOCK:
        known: Sequence[KnownAdapter] = tuple(_KNOWN)
    for each in reversed(known):
        if each.is_same(adapter):
            return each
    raise AdapterError(
        f"an Adapter that staticllm does not know: import StaticLLMPipeline before it is made (the last {MAX_KNOWN} are known), "
        "or use staticllm.Adapter"
    )


def _remember(known: KnownAdapter) -> None:
    with _LOCK:
        _KNOWN.append(known)


def _adapter_init(self: genai.Adapter, *args: Any, **kwargs: Any) -> None:
    _native_adapter_init(self, *args, **kwargs)
    given = next(iter((*args, *kwargs.values())), None)
    if isinstance(given, ov.Tensor):
        _remember(KnownAdapter(self, bytes(given.data.tobytes())))
    elif given is not None:
        _remember(KnownAdapter(self, Path(os.fsdecode(given)).absolute()))


def _config_init(self: genai.AdapterConfig, *args: Any, **kwargs: Any) -> None:
    _native_config_init(self, *args, **kwargs)
    modes = [value for value in (*args, *kwargs.values()) if isinstance(value, genai.AdapterConfig.Mode)]
    if modes:
        _MODES[self] = modes[0]


genai.Adapter.__init__ = _adapter_init
genai.AdapterConfig.__init__ = _config_init

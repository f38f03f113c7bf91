"""What the pipeline is made from: arguments in GenAI's orders, the config, the tokenizer, the model's own options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import openvino_genai as genai

from staticllm.config import StaticLLMConfig
from staticllm.devices import last_line
from staticllm.errors import ConfigError, DeviceError, ModelError
from staticllm.pipelines.loader import device_properties


def positional(
    args: tuple[Any, ...], device: Any, config: Any, tokenizer: Any
) -> tuple[str, Any, genai.Tokenizer | None]:
    """GenAI's two orders: ``(path, device, config)`` and ``(path, tokenizer, device, config)``, by name or by place."""
    rest = list(args)
    if rest and (rest[0] is None or isinstance(rest[0], genai.Tokenizer)):
        tokenizer = rest.pop(0) or tokenizer
    if rest and not isinstance(rest[0], (Mapping, StaticLLMConfig)):
        if device is not None:
            raise ConfigError(f"the device is given twice: {rest[0]!r} by place and {device!r} by name")
        device = rest.pop(0)
    if rest and config is None:
        config = rest.pop(0)
    if rest:
        raise ConfigError(f"{len(args) + 1} positional arguments: at most models_path, tokenizer, device and config")
    if tokenizer is not None and not isinstance(tokenizer, genai.Tokenizer):
        raise ConfigError(f"tokenizer is a {type(tokenizer).__name__}: must be an openvino_genai.Tokenizer")
    return "CPU" if device is None else device, config, tokenizer


def resolve_candidates(devices: str, config: Any, properties: dict[str, Any]) -> list[tuple[str, StaticLLMConfig]]:
    """``(device, config)`` for each of ``"NPU,GPU,CPU"``. A property that another of them knows is left out where it is unknown.

    Raises:
        ConfigError: no device knows a property, or a value is impossible.
        DeviceError: none of the devices is on this machine.
    """
    names = [name.strip() for name in devices.split(",")] if isinstance(devices, str) else [devices]
    supported: dict[str, frozenset[str]] = {}
    for name in names:
        try:
            supported[name] = device_properties(name)
        except DeviceError:  # it is reported when its turn comes
            if len(names) == 1:
                raise
            supported[name] = frozenset()
    if isinstance(config, StaticLLMConfig):
        if properties:
            raise ConfigError(f"both a StaticLLMConfig and the property {next(iter(properties))!r}: give one of them")
        return [(name, config) for name in names]
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config is a {type(config).__name__}: must be a dict of properties or a StaticLLMConfig")
    known = frozenset().union(*supported.values())
    resolved = StaticLLMConfig.from_properties({**(config or {}), **properties}, known)
    return [(name, _for_device(resolved, supported[name])) for name in names]


def _for_device(config: StaticLLMConfig, supported: frozenset[str]) -> StaticLLMConfig:
    return replace(
        config,
        device_properties=_only(config.device_properties, supported),
        prefill_config=_only(config.prefill_config, supported),
        generate_config=_only(config.generate_config, supported),
    )


def _only(properties: Mapping[str, Any], supported: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in properties.items() if name in supported}


def read_tokenizer(directory: os.PathLike[str]) -> genai.Tokenizer:
    try:
        return genai.Tokenizer(directory)
    except RuntimeError as error:
        raise ModelError(f"the tokenizer in {str(directory)!r} cannot be read: {last_line(error)}") from error


def read_generation_config(directory: Any, tokenizer: genai.Tokenizer) -> genai.GenerationConfig:
    path = directory / "generation_config.json"
    try:
        config = genai.GenerationConfig(path) if path.is_file() else genai.GenerationConfig()
    except RuntimeError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {str(error).splitlines()[0]}") from error
    if config.eos_token_id == -1 and tokenizer.get_eos_token_id() != -1:
        config.set_eos_token_id(tokenizer.get_eos_token_id())
    return config

"""What the pipeline is made from: arguments in GenAI's orders, the config, the tokenizer, the model's own options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import openvino_genai as genai

from staticllm.config import StaticLLMConfig
from staticllm.errors import ConfigError, ModelError
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


def resolve_config(device: str, config: Any, properties: dict[str, Any]) -> StaticLLMConfig:
    supported = device_properties(device)
    if isinstance(config, StaticLLMConfig):
        if properties:
            raise ConfigError(f"both a StaticLLMConfig and the property {next(iter(properties))!r}: give one of them")
        return config
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config is a {type(config).__name__}: must be a dict of properties or a StaticLLMConfig")
    return StaticLLMConfig.from_properties({**(config or {}), **properties}, supported)


def read_tokenizer(directory: os.PathLike[str]) -> genai.Tokenizer:
    try:
        return genai.Tokenizer(directory)
    except RuntimeError as error:
        raise ModelError(
            f"the tokenizer in {str(directory)!r} cannot be read: {str(error).splitlines()[-1]}"
        ) from error


def read_generation_config(directory: Any, tokenizer: genai.Tokenizer) -> genai.GenerationConfig:
    path = directory / "generation_config.json"
    try:
        config = genai.GenerationConfig(path) if path.is_file() else genai.GenerationConfig()
    except RuntimeError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {str(error).splitlines()[0]}") from error
    if config.eos_token_id == -1 and tokenizer.get_eos_token_id() != -1:
        config.set_eos_token_id(tokenizer.get_eos_token_id())
    return config

"""Reads the arguments of a pipeline, in GenAI's orders: devices, config, tokenizer, and the model's generation options."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import openvino as ov
import openvino_genai as genai

from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress
from staticllm.devices import check_device, get_core, named_devices, supported_properties
from staticllm.errors import (
    ConfigError,
    DeviceError,
    GenerationConfigError,
    ModelError,
    enough_memory,
    last_line,
    shown,
)
from staticllm.model_dir import keep_in_memory
from staticllm.model_files.model_at import check_model_dir
from staticllm.properties import DEVICE_PROPERTIES, ResolvedConfig, resolve, with_own
from staticllm.system.files import read_regular
from staticllm.system.signal_stack import kept_signal_stack

from ..generation.options.resolve import FileOptions, unreadable_field, values_of
from ..scheduling.policies import check_policy
from .genai_properties import from_genai, plain_properties

Config: TypeAlias = Mapping[str, object] | StaticLLMConfig | None
"""The ``config`` of a constructor: properties by name, or the resolved config."""

TOOL_USE = "tool_use"
MAX_TOKENIZER_CONFIG = 1 << 24


@dataclass(frozen=True)
class Candidate:
    """A device and its config, because devices know different properties."""

    device: str
    config: StaticLLMConfig
    explicit: frozenset[str]
    """Fields that the user gave."""


@dataclass(frozen=True)
class Given:
    """The arguments of a constructor, independent of GenAI's order in which they were given."""

    device: str
    config: Config
    tokenizer: genai.Tokenizer | None
    weights: ov.Tensor | None = None
    generation_config: genai.GenerationConfig | None = None


def positional(args: tuple[Any, ...], device: Any, config: Any, tokenizer: Any) -> Given:
    """Read the arguments after the path or the model, by name or by position, in GenAI's orders: ``device, config``,
    ``tokenizer, device, config`` and ``weights, tokenizer, device, generation_config``.

    Raises:
        ConfigError: there are too many arguments, one is given twice, or the tokenizer has another type.
    """
    rest = list(args)
    weights = rest.pop(0) if rest and isinstance(rest[0], ov.Tensor) else None
    if rest and (rest[0] is None or isinstance(rest[0], genai.Tokenizer)):
        tokenizer = rest.pop(0) or tokenizer
    if rest and not isinstance(rest[0], (Mapping, StaticLLMConfig, genai.GenerationConfig)):
        if device is not None:
            raise ConfigError(f"the device is given twice: {shown(rest[0])} by position and {shown(device)} by name")
        device = rest.pop(0)
    generation_config = rest.pop(0) if rest and isinstance(rest[0], genai.GenerationConfig) else None
    if rest and config is None:
        config = rest.pop(0)
    if rest:
        raise ConfigError(f"{len(args) + 1} positional arguments: at most models_path, tokenizer, device and config")
    if tokenizer is not None and not isinstance(tokenizer, genai.Tokenizer):
        raise ConfigError(f"tokenizer is a {type(tokenizer).__name__}: must be an openvino_genai.Tokenizer")
    return Given("CPU" if device is None else device, config, tokenizer, weights, generation_config)


def named_in_memory(given: Given, properties: dict[str, Any]) -> Given:
    """Move ``weights`` and ``generation_config`` of a model in memory to the arguments.

    Raises:
        ConfigError: one has another type, or the tokenizer is missing.
    """
    weights = given.weights if given.weights is not None else properties.pop("weights", None)
    if weights is None:
        return given
    if not isinstance(weights, ov.Tensor):
        raise ConfigError(f"weights is a {type(weights).__name__}: must be an openvino.Tensor")
    if given.tokenizer is None:
        raise ConfigError(
            "a model in memory has no directory to read a tokenizer from: pass an openvino_genai.Tokenizer"
        )
    config = given.generation_config or properties.pop("generation_config", None)
    if config is not None and not isinstance(config, genai.GenerationConfig):
        raise ConfigError(f"generation_config is a {type(config).__name__}: must be an openvino_genai.GenerationConfig")
    return replace(given, weights=weights, generation_config=config)


def model_path_of(
    models_path: Any, given: Given, candidates: list[Candidate], on_progress: OnProgress = lambda event: None
) -> tuple[Path, list[Candidate]]:
    """Return the checked model directory, or a name that stands for the model in memory, and the candidates for it.

    Raises:
        ModelError: the directory is missing or incomplete, or the model in memory is.
        ConfigError: blobs of a model in memory are exported without ``BLOB_PATH``.
    """
    asked = candidates[0].config
    if given.weights is None:
        is_encrypted = asked.weights_decryption_callback is not None
        needs_tokenizer = given.tokenizer is None
        return check_model_dir(models_path, needs_tokenizer, asked.weights_path, is_encrypted, on_progress), candidates
    if asked.export_blob and asked.blob_path is None:
        raise ConfigError("EXPORT_BLOB of a model in memory: give the folder with BLOB_PATH")
    whole = [
        replace(candidate, config=replace(candidate.config, weights_decryption_callback=bytes))
        for candidate in candidates
    ]
    return keep_in_memory(models_path, given.weights), whole  # no weights file, so blobs must contain the weights


def resolve_candidates(devices: str, config: Config, properties: dict[str, Any]) -> list[Candidate]:
    """Return one candidate per device of ``"NPU,GPU,CPU"``. A device gets only the properties that it knows, and its own.

    Raises:
        ConfigError: none of the devices knows a property, or a value is impossible.
        DeviceError: the only device is not on this machine.
    """
    found = _candidates(devices, config, properties)
    for candidate in found:
        check_policy(candidate.config.scheduler)
    return found


def _candidates(devices: str, config: Config, properties: dict[str, Any]) -> list[Candidate]:
    names = named_devices(devices, get_core().available_devices) if isinstance(devices, str) else [devices]
    supported: dict[str, frozenset[str]] = {}
    for name in names:
        try:
            supported[name] = supported_properties(get_core(), check_device(get_core(), name))
        except DeviceError:  # it is reported when loading tries this device
            if len(names) == 1:
                raise
            supported[name] = frozenset()
    if isinstance(config, StaticLLMConfig):
        if properties:
            raise ConfigError(
                f"both a StaticLLMConfig and the property {shown(next(iter(properties)))}: give one of them"
            )
        plain = ResolvedConfig.of(_with_plain_properties(config))
        return [Candidate(name, plain.config, plain.explicit) for name in names]
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config is a {type(config).__name__}: must be a dict of properties or a StaticLLMConfig")
    known = frozenset().union(*supported.values())
    given = plain_properties({**(config or {}), **properties})
    if DEVICE_PROPERTIES not in given:
        resolved = resolve(from_genai(given), known)
        return [Candidate(name, _for_device(resolved.config, supported[name]), resolved.explicit) for name in names]
    each = {name: resolve(from_genai(with_own(given, name)), known | supported[name]) for name in names}
    return [Candidate(name, _for_device(each[name].config, supported[name]), each[name].explicit) for name in names]


def _with_plain_properties(config: StaticLLMConfig) -> StaticLLMConfig:
    return replace(
        config,
        device_properties=plain_properties(config.device_properties),
        prefill_config=plain_properties(config.prefill_config),
        generate_config=plain_properties(config.generate_config),
    )


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
    """Read the tokenizer in a model directory.

    Raises:
        ModelError: the tokenizer cannot be read.
    """
    try:
        with enough_memory(ModelError, f"the tokenizer in {shown(str(directory))}"), kept_signal_stack():
            return genai.Tokenizer(directory)
    except RuntimeError as error:
        raise ModelError(f"the tokenizer in {shown(str(directory))} cannot be read: {last_line(error)}") from error


def read_tool_template(directory: Path) -> str:
    """Return the chat template that a model directory has for conversations with tools, beside the default; "" without one.

    It is the one that is named ``tool_use``, as in transformers: in the list of ``tokenizer_config.json``, or a file of its own
    in ``additional_chat_templates``.
    """
    try:
        return read_regular(
            directory / "additional_chat_templates" / f"{TOOL_USE}.jinja", MAX_TOKENIZER_CONFIG
        ).decode()
    except (OSError, UnicodeDecodeError):
        pass
    try:
        config = json.loads(read_regular(directory / "tokenizer_config.json", MAX_TOKENIZER_CONFIG))
    except (OSError, ValueError, RecursionError):
        return ""
    templates = config.get("chat_template") if isinstance(config, dict) else None
    for each in templates if isinstance(templates, list) else ():
        if isinstance(each, dict) and each.get("name") == TOOL_USE and isinstance(each.get("template"), str):
            return str(each["template"])
    return ""


@dataclass(frozen=True)
class ReadConfig:
    """The generation options that a model's calls start from, and those among them that its own file sets."""

    config: genai.GenerationConfig
    file: FileOptions | None = None


def read_generation_config(directory: Path, tokenizer: genai.Tokenizer) -> ReadConfig:
    """Read the model's own generation options; the tokenizer's end of sequence is added if they have none.

    Raises:
        ModelError: ``generation_config.json`` cannot be read.
        GenerationConfigError: a field of it has a wrong type; the message names it.
    """
    path = directory / "generation_config.json"
    is_there = path.is_file()
    try:
        config = genai.GenerationConfig(path) if is_there else genai.GenerationConfig()
    except RuntimeError as error:
        if wrong := _unreadable_field(path):
            raise GenerationConfigError(f"{shown(str(path))}: {wrong}; correct it in this file") from None
        raise ModelError(f"{shown(str(path))} cannot be read: {last_line(error)}") from error
    file = FileOptions(str(path), values_of(config)) if is_there else None
    if config.eos_token_id == -1 and tokenizer.get_eos_token_id() != -1:
        config.set_eos_token_id(tokenizer.get_eos_token_id())
    return ReadConfig(config, file)


def _unreadable_field(path: Path) -> str:
    try:
        return unreadable_field(read_regular(path, MAX_TOKENIZER_CONFIG).decode())
    except (OSError, UnicodeDecodeError):
        return ""

"""Translates GenAI's and OpenVINO's properties to ours: plain names and values, a scheduler config, switches."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import openvino as ov
import openvino_genai as genai

from staticllm.config import MAX_SEQS, switch
from staticllm.errors import ConfigError, shown
from staticllm.properties import as_number

from ..generation.genai_adapters import adapter_set_of

BLOCK_SLOTS = 32
"""Tokens per KV block in GenAI on the CPU."""
_BACKENDS = ("SDPA", "PA")
_LOG_LEVELS = {"ERR": "LOG_ERROR", "NO": "LOG_NONE"}
_DEFAULTS = genai.SchedulerConfig()
_OTHER_TOKENS = ("use_cache_eviction", "use_sparse_attention")
_WITHOUT_MEANING = ("max_num_batched_tokens", "num_linear_attention_blocks", "cache_interval_multiplier")
_REMEDIES = {
    "max_num_batched_tokens": "the sizes of steps are chosen by measured cost (PREFILL_ROWS bounds them)",
}


def plain_properties(properties: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return properties with names and values as plain Python types, also within nested mappings.

    The objects of ``openvino.properties`` are callable strings; enum members become the names that devices read.
    """
    return {_plain_name(name): _plain_value(value) for name, value in properties.items()}


def from_genai(properties: Mapping[Any, Any]) -> dict[Any, Any]:
    """Translate properties that only GenAI has to ours, or check that they are switched off.

    Raises:
        ConfigError: a value is impossible, or would change the tokens.
        AdapterError: an adapter is unknown, or its file is missing, damaged or impossible.
    """
    ours = plain_properties(properties)
    for name, take in _TAKEN.items():
        if name in ours:
            take(ours, ours.pop(name))
    return ours


def _plain_name(name: Any) -> Any:
    return str.__str__(name) if isinstance(name, str) else name


def _plain_value(value: Any) -> Any:
    if isinstance(value, ov.OVAny):  # of the pair that a function of ``openvino.properties`` returns
        return _plain_value(value.value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        try:
            return plain_properties(value)
        except RecursionError:
            raise ConfigError("a property holds dicts in dicts without end: give one dict of properties") from None
    if isinstance(value, ov.Type):
        return value.get_type_name()
    is_enum = type(value).__module__.startswith("openvino.") and hasattr(type(value), "__members__")
    if not is_enum:
        return value
    name = str(value.name)
    return _LOG_LEVELS.get(name, f"LOG_{name}") if type(value).__name__ == "Level" else name


def _attention_backend(properties: dict[Any, Any], value: object) -> None:
    """Drop the choice of a backend: both give the same tokens, and here attention runs in the step programs."""
    if not any(isinstance(value, str) and str.__eq__(value, name) for name in _BACKENDS):
        raise ConfigError(f"ATTENTION_BACKEND={shown(value)}: must be SDPA or PA, and has no effect here: leave it out")


def _path(name: str) -> Callable[[dict[Any, Any], Any], None]:
    def take(properties: dict[Any, Any], value: object) -> None:
        if not isinstance(value, str) or value:  # an empty string is no path: it turns the cache off, for example
            properties[name] = value

    return take


def _static_pipeline(properties: dict[Any, Any], value: object) -> None:
    _has_no_effect("STATIC_PIPELINE chooses among NPUW's pipelines, which staticllm replaces")


def _auto_batching(properties: dict[Any, Any], value: object) -> None:
    """Drop the choice: OpenVINO batches for ``PERFORMANCE_HINT=THROUGHPUT`` on a GPU, here the engine packs requests."""
    switch("ALLOW_AUTO_BATCHING", value)


def _enable_mmap(properties: dict[Any, Any], value: object) -> None:
    if not switch("ENABLE_MMAP", value):
        _has_no_effect("ENABLE_MMAP=False: the weights are always mapped")


def _adapters(properties: dict[Any, Any], value: object) -> None:
    if value is not None:
        properties["ADAPTERS"] = adapter_set_of(value)


def _prompt_lookup(properties: dict[Any, Any], value: object) -> None:
    properties.setdefault("PROMPT_LOOKUP", value)


def _scheduler_config(properties: dict[Any, Any], value: object) -> None:
    """Translate the fields of a ``SchedulerConfig`` to properties; properties that are also given take precedence."""
    if value is None:
        return
    if not isinstance(value, genai.SchedulerConfig):
        raise ConfigError(f"scheduler_config is a {type(value).__name__}: must be an openvino_genai.SchedulerConfig")
    for name in _OTHER_TOKENS:
        if getattr(value, name):
            raise ConfigError(f"scheduler_config.{name} is not supported, it changes the tokens: leave it False")
    asked: dict[str, Any] = {"PREFIX_CACHING": value.enable_prefix_caching}
    if not value.dynamic_split_fuse:
        asked["SCHEDULER"] = "prefill_first"
    if value.max_num_seqs != _DEFAULTS.max_num_seqs:
        asked["MAX_NUM_SEQS"] = min(value.max_num_seqs, MAX_SEQS)
    if value.num_kv_blocks:
        asked["KV_SLOTS"] = max(value.num_kv_blocks * BLOCK_SLOTS, _longest(properties))
    elif value.cache_size and "KV_SLOTS" not in properties:
        asked["KV_CACHE_GB"] = value.cache_size
    properties.update({name: choice for name, choice in asked.items() if name not in properties})
    notes = [f"{name} ({_REMEDIES.get(name, 'there is nothing like it')})" for name in _unused(value)]
    if value.max_num_seqs > MAX_SEQS and "MAX_NUM_SEQS" in asked:
        notes.append(f"max_num_seqs above {MAX_SEQS} (a step holds no more)")
    if notes:
        _has_no_effect(f"scheduler_config: {', '.join(notes)}")


def _unused(config: genai.SchedulerConfig) -> list[str]:
    """Return the fields that were set and have no effect here; an unlimited batch has no effect in GenAI either."""
    changed = [name for name in _WITHOUT_MEANING if getattr(config, name) != getattr(_DEFAULTS, name)]
    return [name for name in changed if getattr(config, name) != sys.maxsize]


def _longest(properties: Mapping[Any, Any]) -> int:
    """Return the KV slots of one longest sequence, which must fit; impossible lengths are reported where they are read."""
    lengths = (properties.get("MAX_PROMPT_LEN", 1024), properties.get("MIN_RESPONSE_LEN", 128))
    return sum(length for length in map(as_number, lengths) if isinstance(length, int))


def _has_no_effect(what: str) -> None:
    warnings.warn(f"{what}: no effect", stacklevel=2)


_TAKEN: dict[str, Callable[[dict[Any, Any], Any], None]] = {
    "ATTENTION_BACKEND": _attention_backend,
    **{name: _path(name) for name in ("CACHE_DIR", "BLOB_PATH", "WEIGHTS_PATH")},
    "STATIC_PIPELINE": _static_pipeline,
    "ENABLE_MMAP": _enable_mmap,
    "ALLOW_AUTO_BATCHING": _auto_batching,
    "prompt_lookup": _prompt_lookup,
    "adapters": _adapters,
    "scheduler_config": _scheduler_config,
}

"""Reads properties into a config: GenAI's names for its fields, NPUW's hints, and names that are refused."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from staticllm.config import StaticLLMConfig, one_of, whole
from staticllm.errors import ConfigError

_REPLACED_PREFIXES = ("NPUW_", "NPU_USE_NPUW")
_NOT_HERE = {
    "scheduler_config": "use MAX_NUM_SEQS, KV_SLOTS, MAX_WAITING and SCHEDULER",
    "ATTENTION_BACKEND": "attention runs in the step programs; leave it out",
    "ENABLE_MMAP": "the IR is always mapped; leave it out",
}
"""Names that a pipeline accepts for compatibility with GenAI, but ``StaticLLMConfig`` does not have, with the remedy."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A config, and the names of its fields that the user gave; a blob set decides the others.

    ``explicit`` also has the fields whose given value equals the default.
    """

    config: StaticLLMConfig
    explicit: frozenset[str]

    @classmethod
    def of(cls, config: StaticLLMConfig) -> ResolvedConfig:
        """Resolve a config that was made field by field: the fields that differ from the defaults count as given."""
        return cls(config, config.non_default)


def resolve(properties: Mapping[str, Any], supported: Collection[str] = ()) -> ResolvedConfig:
    """Read properties with GenAI's names into a config. ``supported``: the names that the device accepts.

    Raises:
        ConfigError: a name is unknown (the message has the nearest known one), or a value is impossible.
    """
    options: dict[str, Any] = {}
    device_properties: dict[str, Any] = {}
    for name, value in properties.items():
        if name in _OWN:
            options[_OWN[name]] = value
        elif name in _HINTS:
            _HINTS[name](options, value, properties)
        elif name in supported:
            device_properties[name] = value
        else:
            _refuse(name, supported)
    for name in ("prefill_config", "generate_config"):
        if isinstance(extra := options.get(name), Mapping):
            options[name] = _phase_properties(name.upper(), extra, supported)
    if device_properties:
        options["device_properties"] = device_properties
    return ResolvedConfig(StaticLLMConfig(**options), frozenset(options))


def _phase_properties(name: str, extra: Mapping[str, Any], supported: Collection[str]) -> dict[str, Any]:
    """Return the properties of one phase that the device accepts.

    Raises:
        ConfigError: a name is unknown, or sets the type of the KV slots, which both phases share.
    """
    if "KV_CACHE_PRECISION" in extra:
        raise ConfigError(f"KV_CACHE_PRECISION in {name}: both phases share the KV slots, give it beside {name}")
    for key in extra:
        if key not in supported:
            _refuse(key, supported)
    return {key: value for key, value in extra.items() if key in supported}


def _refuse(name: object, supported: Collection[str]) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"unknown property {name!r}: names are strings")
    if name in _NOT_HERE:
        raise ConfigError(f"{name} is not supported: {_NOT_HERE[name]}")
    if name.startswith(_REPLACED_PREFIXES):
        warnings.warn(f"{name} controls NPUW, which staticllm replaces: it has no effect", stacklevel=4)
        return
    near = difflib.get_close_matches(name, [*_OWN, *_HINTS, *supported], n=1)
    raise ConfigError(f"unknown property {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))


def _prefill_hint(options: dict[str, Any], value: object, properties: Mapping[str, Any]) -> None:
    one_of("PREFILL_HINT", value, ("DYNAMIC", "STATIC"))
    if value == "STATIC":
        options.setdefault("prefill_rows", [properties.get("MAX_PROMPT_LEN", StaticLLMConfig.max_prompt_len)])


def _generate_hint(options: dict[str, Any], value: object, properties: Mapping[str, Any]) -> None:
    one_of("GENERATE_HINT", value, ("FAST_COMPILE", "BEST_PERF"))
    if value == "FAST_COMPILE":
        lengths = (
            ("MAX_PROMPT_LEN", StaticLLMConfig.max_prompt_len),
            ("MIN_RESPONSE_LEN", StaticLLMConfig.min_response_len),
        )
        total = sum(whole(name, properties.get(name, default), 1) for name, default in lengths)
        options.setdefault("generate_kv_lens", [total])


_OWN = {item.name.upper(): item.name for item in fields(StaticLLMConfig) if item.name != "device_properties"}
"""Property name → field. Every field but the pass-through is a property under its upper-case name."""

_HINTS = {"PREFILL_HINT": _prefill_hint, "GENERATE_HINT": _generate_hint}

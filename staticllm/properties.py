"""Reads properties into a config: GenAI's names for its fields, NPUW's hints, and names that are refused."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from staticllm.config import StaticLLMConfig, one_of, whole
from staticllm.devices import kind
from staticllm.errors import ConfigError, shown

DEVICE_PROPERTIES = "DEVICE_PROPERTIES"
MAX_DIGITS = 100
_REPLACED_PREFIXES = ("NPUW_", "NPU_USE_NPUW")
_NOT_HERE = {
    "scheduler_config": "use MAX_NUM_SEQS, KV_SLOTS, MAX_WAITING and SCHEDULER",
    "ATTENTION_BACKEND": "attention runs in the step programs; leave it out",
    "ENABLE_MMAP": "the IR is always mapped; leave it out",
}
"""Names that a pipeline accepts for compatibility with GenAI, but ``StaticLLMConfig`` does not have, with the remedy."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A config, and the names of its fields that the user gave; a blob set decides the others."""

    config: StaticLLMConfig
    explicit: frozenset[str]
    """Also has the fields whose given value equals the default."""

    @classmethod
    def of(cls, config: StaticLLMConfig) -> ResolvedConfig:
        """Resolve a config that was made field by field: the fields that differ from the defaults count as given."""
        return cls(config, config.non_default)


def resolve(
    properties: Mapping[str, Any], supported: Collection[str] = (), others: Collection[str] | None = None
) -> ResolvedConfig:
    """Read properties with GenAI's names into a config.

    Args:
        supported: The names that the device accepts.
        others: The other names that a misspelled one may stand for; None for those of language models.

    Raises:
        ConfigError: a name is unknown (the message has the nearest known one), or a value is impossible.
    """
    options: dict[str, Any] = {}
    device_properties: dict[str, Any] = {}
    properties = {name: as_number(value) if name in _NUMBERS else value for name, value in properties.items()}
    for name, value in properties.items():
        if name in _OWN:
            options[_OWN[name]] = value
        elif name in _HINTS:
            _HINTS[name](options, value, properties)
        elif name in supported:
            device_properties[name] = value
        else:
            _refuse(name, supported, DECODER_OPTIONS if others is None else others)
    for name in ("prefill_config", "generate_config"):
        if isinstance(extra := options.get(name), Mapping):
            options[name] = _phase_properties(name.upper(), extra, supported)
    if device_properties:
        options["device_properties"] = device_properties
    return ResolvedConfig(StaticLLMConfig(**options), frozenset(options))


def properties_by_device(value: object) -> dict[str, dict[str, Any]]:
    """Return the value of ``DEVICE_PROPERTIES``: the properties of one device each, by its name in capitals.

    ``value`` may also be the text of a JSON object, as OpenVINO reads it.

    Raises:
        ConfigError: it is no dict of one dict per device, or is in itself.
    """
    given: Any = value
    if isinstance(value, str):
        try:
            given = json.loads(value or "{}")
        except (ValueError, RecursionError):
            raise ConfigError(f"{DEVICE_PROPERTIES}={shown(value)}: is no JSON object") from None
    is_nested = isinstance(given, Mapping) and all(
        isinstance(name, str) and isinstance(own, Mapping) for name, own in given.items()
    )
    if not is_nested:
        raise ConfigError(
            f"{DEVICE_PROPERTIES}={shown(value)}: must be a dict of one dict of properties per device, for example "
            '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'
        )
    found = {name.strip().upper(): dict(own) for name, own in given.items()}
    for device, own in found.items():
        if DEVICE_PROPERTIES in own:
            raise ConfigError(
                f"{DEVICE_PROPERTIES} in those of {device!r}: give the properties of {device} there directly"
            )
    return found


def with_own(properties: Mapping[Any, Any], device: str) -> dict[Any, Any]:
    """Return properties with those of ``device`` in ``DEVICE_PROPERTIES``, which win over the common ones, in their place.

    Those of ``GPU`` are also those of ``GPU.0``. Those of other devices are left out, as in OpenVINO.

    Raises:
        ConfigError: ``DEVICE_PROPERTIES`` is no dict of one dict per device.
    """
    common = {name: value for name, value in properties.items() if name != DEVICE_PROPERTIES}
    if DEVICE_PROPERTIES not in properties:
        return common
    own = properties_by_device(properties[DEVICE_PROPERTIES])
    return {**common, **own.get(kind(device), {}), **own.get(device, {})}


def as_number(value: Any) -> Any:
    """Return a number that is written as text, as the values of OpenVINO's properties may be; other values unchanged."""
    if not isinstance(value, str) or len(value) > MAX_DIGITS:
        return value
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return number if math.isfinite(number := read(value)) else value
    return value


def _phase_properties(name: str, extra: Mapping[str, Any], supported: Collection[str]) -> dict[str, Any]:
    """Return the properties of one phase that the device accepts.

    Raises:
        ConfigError: a name is unknown, or sets the type of the KV slots, which both phases share.
    """
    if "KV_CACHE_PRECISION" in extra:
        raise ConfigError(f"KV_CACHE_PRECISION in {name}: both phases share the KV slots, give it beside {name}")
    for key in extra:
        if key not in supported:
            _refuse(key, supported, DECODER_OPTIONS)
    return {key: value for key, value in extra.items() if key in supported}


def _refuse(name: object, supported: Collection[str], others: Collection[str]) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"unknown property {name!r}: names are strings")
    if name in _NOT_HERE:
        raise ConfigError(f"{name} is not supported: {_NOT_HERE[name]}")
    if name.startswith(_REPLACED_PREFIXES):
        warnings.warn(f"{name} controls NPUW, which staticllm replaces: it has no effect", stacklevel=4)
        return
    if name in others:
        raise ConfigError(
            f"{name} cannot be given here: it is an option of a pipeline, for all of its devices and phases"
        )
    known = {each.upper(): each for each in (*supported, *others)}
    near = difflib.get_close_matches(name.upper(), known, n=1)
    raise ConfigError(f"unknown property {shown(name)}" + (f": did you mean {known[near[0]]!r}?" if near else ""))


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


_NO_PROPERTIES = ("device_properties", "cross_windows")
_OWN = {item.name.upper(): item.name for item in fields(StaticLLMConfig) if item.name not in _NO_PROPERTIES}
"""Property name → field. Every field is a property under its upper-case name, but the pass-through and what a pipeline sets."""

_OF_PIPELINES = ("adapters", "draft_model", "prompt_lookup")
"""Names of GenAI that a pipeline takes in this spelling."""


def _is_number(item: Field[Any]) -> bool:
    return str(item.type).removesuffix(" | None") in ("int", "float")


_LENGTHS = frozenset(["MAX_PROMPT_LEN", "MIN_RESPONSE_LEN"])
_NUMBERS = frozenset(item.name.upper() for item in fields(StaticLLMConfig) if _is_number(item)) - _LENGTHS
"""The numbers that may be written as text. GenAI refuses the lengths so."""
_HINTS = {"PREFILL_HINT": _prefill_hint, "GENERATE_HINT": _generate_hint}
DECODER_OPTIONS = (*_HINTS, *_OWN, DEVICE_PROPERTIES, *_OF_PIPELINES)
"""The names of the options of language models, beside those of the device."""

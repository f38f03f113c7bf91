"""What a ``GenerationConfig`` says about one request: values that have no effect there are left out, as in GenAI.

A config comes from the model's own file, or was derived from one. A keyword is what this request asks for, so its value is
always checked; a value of the config is checked only if it has an effect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import openvino_genai as genai

from staticllm.errors import shown
from staticllm.pipelines.generation.options.table import OPTIONS, Option

NAMES = tuple(
    name
    for name in dir(genai.GenerationConfig)
    if not name.startswith(("_", "is_")) and not callable(getattr(genai.GenerationConfig, name))
)
DEFAULTS = genai.GenerationConfig()
WIDE = ("temperature", "repetition_penalty", "diversity_penalty", "length_penalty")
"""Numbers that GenAI does not bound on one side or on both. Beyond the bounds of the table no token changes."""
DRAFTING = ("max_ngram_size", "num_assistant_tokens", "assistant_confidence_threshold")
DRAWING = ("temperature", "top_k", "top_p", "min_p")
_TREE_WIDTH = "branching_factor"
"""The shape of a tree of drafts, which GenAI does not read without ``tree_depth``."""


@dataclass(frozen=True)
class FileOptions:
    """The options that a model's own ``generation_config.json`` sets, as the file at ``path`` was read. Others have defaults."""

    path: str
    values: Mapping[str, Any]

    def names_in(self, values: Mapping[str, Any]) -> list[str]:
        """Return the options that still have the file's values, which no default is."""
        return [name for name in NAMES if values[name] == self.values[name] != getattr(DEFAULTS, name)]


def values_of(config: genai.GenerationConfig) -> dict[str, Any]:
    """Return the value of each option of a config."""
    return {name: getattr(config, name) for name in NAMES}


def unreadable_field(text: str) -> str:
    """Return what is wrong with the field of a ``generation_config.json`` that GenAI cannot read; "" if none is found."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    for name, value in fields.items() if isinstance(fields, dict) else ():
        needed = _needed_type(name, value) if name in NAMES and value is not None else ""
        if needed:
            return f"{name}={shown(value)}: must be {needed}"
    return ""


def _needed_type(name: str, value: Any) -> str:
    """Return of which type a field must be, if ``value`` is of none that GenAI reads; it ignores most lists."""
    values = value if isinstance(value, list) else [value]
    are_whole = all(type(item) is int for item in values)
    is_list, default = isinstance(value, list), getattr(DEFAULTS, name)
    if name == "eos_token_id":
        return "" if are_whole else "a token id, or a list of them"
    if name == "num_assistant_tokens":
        return "" if are_whole and not is_list else "a whole number"
    if name == "stop_strings":
        return "a list of str" if is_list and not all(isinstance(item, str) for item in values) else ""
    if isinstance(default, bool):
        return "" if is_list or isinstance(value, bool) else "true or false"
    is_read = isinstance(value, (int, float)) and (isinstance(default, float) or not isinstance(value, bool))
    return "" if is_list or is_read or not isinstance(default, (int, float)) else "a number"


def in_effect(given: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each option of a request, before it is checked.

    A value ``given`` by a config without effect in this request is replaced by the default, and one that a value of
    ``keywords`` leaves no room for is adapted to it.
    """
    merged = {name: keywords.get(name, value) for name, value in given.items()}
    for adapt in _ADAPTED:
        merged |= {name: value for name, value in adapt(merged).items() if name not in keywords}
    if "min_new_tokens" not in keywords and isinstance(most := keywords.get("max_new_tokens"), int):
        merged["min_new_tokens"] = max(0, min(merged["min_new_tokens"], most))
    return merged


def _one_beam(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_beams": 1} if _is_plainly(options["num_beams"], 0) else {}


def _without_drawing(options: Mapping[str, Any]) -> dict[str, Any]:
    return {} if options["do_sample"] else defaults_of(DRAWING)


def _without_tree(options: Mapping[str, Any]) -> dict[str, Any]:
    return {} if options["tree_depth"] else defaults_of([_TREE_WIDTH])


def _possible_drafts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out drafts of requests that have none, and the confidence of drafts where it decides nothing."""
    if not (_is_plainly(options["num_beams"], 1) and _is_plainly(options["num_return_sequences"], 1)):
        return defaults_of(DRAFTING)
    confidence = options["assistant_confidence_threshold"]
    is_used = isinstance(confidence, (int, float)) and 0 <= confidence <= 1 and not options["num_assistant_tokens"]
    return {} if is_used else {"assistant_confidence_threshold": 0.0}


def _lengths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out ``max_length`` beside ``max_new_tokens``, which has priority."""
    return {} if _is_plainly(options["max_new_tokens"], DEFAULTS.max_new_tokens) else defaults_of(["max_length"])


def _bounded(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _nearest(options[name], OPTIONS[name]) for name in WIDE}


def _nearest(value: Any, bounds: Option) -> Any:
    """Return a number within bounds. 0 and negative ones stay where only positive ones are possible, to be refused."""
    if not isinstance(value, (int, float)):
        return value
    if value > bounds.most:
        return bounds.most
    return bounds.least if value < bounds.least and (value > 0 or bounds.least < 0) else value


def _logprobs(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"logprobs": min(options["logprobs"], 1)} if isinstance(options["logprobs"], int) else {}


def defaults_of(names: Iterable[str]) -> dict[str, Any]:
    """Return the default of each of some options."""
    return {name: getattr(DEFAULTS, name) for name in names}


def _is_plainly(value: Any, number: int) -> bool:
    return isinstance(value, int) and value == number


_ADAPTED: tuple[Callable[[Mapping[str, Any]], dict[str, Any]], ...] = (
    _one_beam,
    _without_drawing,
    _without_tree,
    _possible_drafts,
    _lengths,
    _bounded,
    _logprobs,
)

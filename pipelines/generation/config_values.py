"""What a ``GenerationConfig`` says about one request: values that have no effect there are left out, as in GenAI.

A config comes from the model's own file, or was derived from one. A keyword is what this request asks for, so its value is
always checked; a value of the config is checked only if it has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import openvino_genai as genai

from staticllm.pipelines.generation.extra_options import Bounds

NAMES = tuple(
    name
    for name in dir(genai.GenerationConfig)
    if not name.startswith(("_", "is_")) and not callable(getattr(genai.GenerationConfig, name))
)
DEFAULTS = genai.GenerationConfig()
WIDE = {
    "temperature": Bounds(0.0, 1e6),
    "repetition_penalty": Bounds(1e-3, 1e3),
    "diversity_penalty": Bounds(-1e6, 1e6),
    "length_penalty": Bounds(-1e3, 1e3),
}
"""Numbers that GenAI does not bound on one side or on both. Beyond these bounds no token changes."""
DRAFTING = ("max_ngram_size", "num_assistant_tokens", "assistant_confidence_threshold")
_DRAWING = ("temperature", "top_k", "top_p", "min_p")
_TREE_WIDTH = "branching_factor"
"""The shape of a tree of drafts, which GenAI does not read without ``tree_depth``."""


def in_effect(config: genai.GenerationConfig, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each option of a request, before it is checked.

    A value of ``config`` without effect in this request is replaced by the default, and one that a value of ``keywords``
    leaves no room for is adapted to it.
    """
    given = {name: getattr(config, name) for name in NAMES}
    merged = {name: keywords.get(name, value) for name, value in given.items()}
    for adapt in _ADAPTED:
        merged |= {name: value for name, value in adapt(merged).items() if name not in keywords}
    if "min_new_tokens" not in keywords and isinstance(most := keywords.get("max_new_tokens"), int):
        merged["min_new_tokens"] = max(0, min(merged["min_new_tokens"], most))
    return merged


def _one_beam(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_beams": 1} if _is_plainly(options["num_beams"], 0) else {}


def _without_drawing(options: Mapping[str, Any]) -> dict[str, Any]:
    return {} if options["do_sample"] else _defaults_of(_DRAWING)


def _without_tree(options: Mapping[str, Any]) -> dict[str, Any]:
    return {} if options["tree_depth"] else _defaults_of([_TREE_WIDTH])


def _possible_drafts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out drafts of requests that have none, and the confidence of drafts where it decides nothing."""
    if not (_is_plainly(options["num_beams"], 1) and _is_plainly(options["num_return_sequences"], 1)):
        return _defaults_of(DRAFTING)
    confidence = options["assistant_confidence_threshold"]
    is_used = isinstance(confidence, (int, float)) and 0 <= confidence <= 1 and not options["num_assistant_tokens"]
    return {} if is_used else {"assistant_confidence_threshold": 0.0}


def _lengths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out ``max_length`` beside ``max_new_tokens``, which has priority."""
    return {} if _is_plainly(options["max_new_tokens"], DEFAULTS.max_new_tokens) else _defaults_of(["max_length"])


def _bounded(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _nearest(options[name], bounds) for name, bounds in WIDE.items()}


def _nearest(value: Any, bounds: Bounds) -> Any:
    """Return a number within bounds. 0 and negative ones stay where only positive ones are possible, to be refused."""
    if not isinstance(value, (int, float)):
        return value
    if value > bounds.most:
        return bounds.most
    return bounds.least if value < bounds.least and (value > 0 or bounds.least < 0) else value


def _logprobs(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"logprobs": min(options["logprobs"], 1)} if isinstance(options["logprobs"], int) else {}


def _defaults_of(names: Any) -> dict[str, Any]:
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

"""What happens to a conversation that fills its slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from staticllm.errors import GenerationConfigError, shown

OverflowRule = Literal["stop", "truncate_middle", "shift", "context_shift"]
"""Rules for a conversation that fills its slots. The tokens that remain are recomputed, so that they work for any model.

The names are LM Studio's: ``truncate_middle`` keeps both ends, ``shift`` is a rolling window. ``context_shift`` keeps the same
tokens as ``shift`` without computing them again: their keys are turned to their new positions, where the model's keys allow it
(``kvcache/rotation.py``). These keys and values have seen the removed tokens, so its answers differ from those of ``shift``.
"""
SINKS = 4
"""The number of first tokens that ``shift`` keeps, because attention needs them (StreamingLLM, arXiv 2309.17453)."""


def truncate_middle(tokens: list[int], limit: int) -> list[int]:
    """Return ``limit`` tokens: the first ones for a quarter, such as the system message, and the newest for the rest."""
    head = limit // 4
    return [*tokens[:head], *tokens[len(tokens) - (limit - head) :]]


def shift(tokens: list[int], limit: int) -> list[int]:
    """Return ``limit`` tokens: the first ``SINKS`` as attention sinks, and the newest."""
    head = min(SINKS, limit // 2)
    return [*tokens[:head], *tokens[len(tokens) - (limit - head) :]]


RULES: dict[OverflowRule, Callable[[list[int], int], list[int]] | None] = {
    "stop": None,
    "truncate_middle": truncate_middle,
    "shift": shift,
    "context_shift": shift,
}


def overflow_rule(name: object) -> OverflowRule:
    """Return ``name`` if it is the name of a rule.

    Raises:
        GenerationConfigError: there is no such rule.
    """
    rule: OverflowRule
    for rule in RULES:
        if isinstance(name, str) and str.__eq__(name, rule):
            return rule
    raise GenerationConfigError(f"overflow={shown(name)}: must be one of {', '.join(RULES)}")


def shorten(tokens: list[int], limit: int, rule: OverflowRule) -> list[int]:
    """Return the tokens that the rule keeps; all of them if there are at most ``limit``, or if the rule is ``stop``."""
    cut = RULES[rule]
    return tokens if cut is None or len(tokens) <= limit else cut(tokens, limit)

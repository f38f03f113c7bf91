"""What happens when a conversation fills its slots. The tokens that are kept run again, so any model can do it.

Cutting the slots themselves would keep keys that saw tokens which are gone, and positions that no longer fit. Re-running half
a conversation costs one prefill per half conversation. LM Studio names the rules ``truncate_middle`` (keep the ends) and
``shift`` (rolling window, also known as context shift).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from staticllm.errors import GenerationConfigError

OverflowRule = Literal["stop", "truncate_middle", "shift"]
SINKS = 4
"""Attention needs the first tokens, whatever they are (StreamingLLM, arXiv 2309.17453)."""


def truncate_middle(tokens: list[int], limit: int) -> list[int]:
    """The first quarter of ``limit`` tokens, a system message for one, and the newest."""
    head = limit // 4
    return [*tokens[:head], *tokens[len(tokens) - (limit - head) :]]


def shift(tokens: list[int], limit: int) -> list[int]:
    """The first few tokens as attention sinks, and the newest."""
    head = min(SINKS, limit // 2)
    return [*tokens[:head], *tokens[len(tokens) - (limit - head) :]]


RULES: dict[OverflowRule, Callable[[list[int], int], list[int]] | None] = {
    "stop": None,
    "truncate_middle": truncate_middle,
    "shift": shift,
}


def overflow_rule(name: object) -> OverflowRule:
    """
    Raises:
        GenerationConfigError: there is no such rule.
    """
    if name not in RULES:
        raise GenerationConfigError(f"overflow={name!r}: must be one of {', '.join(RULES)}")
    return name


def shorten(tokens: list[int], limit: int, rule: OverflowRule) -> list[int]:
    """``tokens`` if they are at most ``limit``, else what the rule keeps of them; all of them where it keeps none."""
    cut = RULES[rule]
    return tokens if cut is None or len(tokens) <= limit else cut(tokens, limit)

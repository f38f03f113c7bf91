"""The grammars of what comes before an answer proper, in the format of structural tags."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..generation.grammar import Grammar


@dataclass(frozen=True)
class LeadGrammars:
    """The grammars of what comes before an answer proper: the opening, the reasoning up to its end, and that end alone.

    Each is None where there is none.
    """

    opening: Grammar | None
    reasoning: Grammar | None
    closing: Grammar | None


def lead_of(grammar: Grammar) -> LeadGrammars | None:
    """Return the grammars of what comes before the answer proper; None if nothing does."""
    if not grammar.has_lead:
        return None
    opening = _structural_tag(_fixed_text(grammar.opening)) if grammar.opening else None
    if not grammar.reasoning_end:
        return LeadGrammars(opening, None, None)
    marker = grammar.reasoning_end.rstrip()  # the whitespace behind it is layout, which must follow
    reasoning: dict[str, object] = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": marker}
    layout = _fixed_text(grammar.reasoning_end[len(marker) :])
    closing = _structural_tag(_fixed_text(grammar.reasoning_end))
    return LeadGrammars(opening, _structural_tag([reasoning, *layout]), closing)


def _fixed_text(text: str) -> list[dict[str, object]]:
    return [{"type": "const_string", "value": text}] if text else []


def _structural_tag(elements: list[dict[str, object]]) -> Grammar:
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    return Grammar("structural_tag", json.dumps(tag, ensure_ascii=False))

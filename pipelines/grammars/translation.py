"""Translates a grammar into a syntax tree, and into the text that llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.grammars.ebnf import ROOT, parse_ebnf
from staticllm.pipelines.grammars.grammar import Grammar
from staticllm.pipelines.grammars.json_schema import prepared, read_schema
from staticllm.pipelines.grammars.nodes import (
    LarkWriter,
    Node,
    Pattern,
    Reference,
    Rules,
    Schema,
    Text,
    one_of,
)
from staticllm.pipelines.grammars.regex import rust_regex
from staticllm.pipelines.grammars.structural_tags import StructuralTag


@dataclass(frozen=True)
class SyntaxTree:
    """What an answer consists of, and the rules that it refers to."""

    root: Node
    rules: Rules = field(default_factory=dict)


def tree_of(grammar: Grammar, special: Mapping[str, int] | None = None) -> SyntaxTree | None:
    """Return the syntax tree of a grammar; None for one in Lark, which only llguidance reads.

    Where a structural tag has the text of one of the ``special`` tokens (ids by text), it stands for the token.

    Raises:
        GenerationConfigError: the grammar is malformed.
    """
    if grammar.kind == "json_schema":
        return SyntaxTree(Schema(prepared(read_schema(grammar.text))))
    if grammar.kind == "regex":
        return SyntaxTree(Pattern(rust_regex(grammar.text)))
    if grammar.kind == "choice":
        return SyntaxTree(one_of([Text(text) for text in choices_of(grammar)]))
    if grammar.kind == "ebnf":
        return SyntaxTree(Reference(ROOT), parse_ebnf(grammar.text))
    if grammar.kind == "structural_tag":
        tag = StructuralTag(grammar.text)
        return SyntaxTree(tag.root.with_special_tokens(special or {}), tag.rules)
    return None


def lark_of(grammar: Grammar, special: Mapping[str, int] | None = None) -> str:
    """Return the text of a grammar for llguidance. ``special`` is as for ``tree_of``.

    Raises:
        GenerationConfigError: the grammar is malformed.
    """
    tree = tree_of(grammar, special)
    return grammar.text if tree is None else LarkWriter(tree.rules).write(tree.root)


def choices_of(grammar: Grammar) -> list[str]:
    """Return the strings of a grammar of the kind ``choice``. Raises GenerationConfigError: they are not a list of strings."""
    try:
        choices = json.loads(grammar.text)
    except ValueError:
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) for text in choices):
        raise GenerationConfigError(f"choice={grammar.text[:80]!r}: must be a list of str that is not empty")
    return choices

"""Tests the terminal of texts that do not contain another, against Python's ``in``."""

from __future__ import annotations

import itertools
import re

import pytest
from support.engine.grammars import OTHER_SPECIAL, compiler_of

from staticllm.pipelines.generation.grammar import Grammar
from staticllm.pipelines.grammars.nodes import without

pytest.importorskip("llguidance")
LONGEST = 7


@pytest.mark.parametrize("excluded", ["a", "ab", "abb", "abcb", "acbbc"])
def test_a_positive_expression_matches_all_texts_without_another(excluded):
    terminal = without(excluded)
    assert not terminal.startswith("~")
    regex = re.compile(terminal[1:-1])
    for length in range(LONGEST + 1):
        for chars in itertools.product("abc", repeat=length):
            text = "".join(chars)
            assert (regex.fullmatch(text) is None) == (excluded in text), text


@pytest.mark.parametrize("excluded", ["</f>", "<", "-->", "]]>"])
def test_llguidance_reads_it(excluded):
    """The last two begin with a character that they have again, which takes a complement."""
    grammar = Grammar("lark", f'start: T\nT: (/(?s:.*)/ & {without(excluded)}) "!"')
    compiler = compiler_of()
    matcher = compiler.matcher(grammar, OTHER_SPECIAL + 1)
    for text in (excluded, f"x{excluded}", f"{excluded[:-1]}{excluded}", excluded[:-1], f"\n{excluded[1:]}", "é<f>/"):
        followed = matcher.clone()
        matches = True
        for token in f"{text}!".encode():
            matches = matches and bool(followed.allowed()[token])
            if matches:
                followed.accept([token])
        assert matches == (excluded not in text), text

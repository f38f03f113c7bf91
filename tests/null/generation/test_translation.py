"""Tests how regular expressions, EBNF, JSON schemas and structural tags are translated; nothing is compiled."""

import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.grammars import END, OTHER_SPECIAL, WORDS, compiler_of, encode, small_vocabulary
from support.quick import examples

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.generation.grammar import KINDS, Grammar
from staticllm.pipelines.grammars.ebnf import parse_ebnf
from staticllm.pipelines.grammars.fewest_tokens import TokenBounds
from staticllm.pipelines.grammars.json_schema import prepared, read_schema
from staticllm.pipelines.grammars.nodes import Reference, Repeat, regular_rules, walk, without_tail_calls
from staticllm.pipelines.grammars.regex import rust_regex
from staticllm.pipelines.grammars.translation import lark_of
from staticllm.pipelines.grammars.vocabulary import read_vocabulary


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^ab$", "ab"),
        ("^a|b$", "a|b"),
        (r"\$", r"\u{24}"),
        (r"a\\$", r"a\u{5c}"),
        (r"\d+", "[0-9]+"),
        (r"[\d.]", "[[0-9].]"),
        (r"[^\W_]", "[^[^0-9A-Za-z_]_]"),
        ("[[]", r"[\u{5b}]"),
        ("a*?b+?c??", "a*b+c?"),
        ("x{,3}", "x{0,3}"),
        ("x{2,3}?", "x{2,3}"),
        ("{x}", r"\{x\}"),
        ("a/b", r"a\/b"),
        ("a\nb", r"a\u{a}b"),
        ("(?:a|b)c", "(?:a|b)c"),
        ("[a-z&&c]", r"[a-z\u{26}\u{26}c]"),
    ],
)
def test_regexes_become_those_of_rust(pattern, expected):
    assert rust_regex(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(^a|b)", "has '\\^' within it, at position 1"),
        ("x|y(a$b)", "has '\\$' within it, at position 5"),
        (r"\bword", "at position 0: it matches a place and not a character"),
        ("(a|b)[abc", "at position 5: it is not closed"),
        ("a\\", "single backslash within it, at position 1"),
    ],
)
def test_impossible_regexes_are_one_line_errors(pattern, message):
    with pytest.raises(GenerationConfigError, match=message) as error:
        rust_regex(pattern)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('start ::= "a"', "has no rule 'root'"),
        ("root ::= other", "needs 'other', which it does not define"),
        ('root ::= "a', "line 1, column 12: a string is not closed"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule 'root' is defined twice"),
        ("root ::= [a", "a class is not closed"),
        ("root ::= []", "matches nothing"),
        ("root ::= [z-a]", "is empty"),
        ('root ::= ("a"', r"'\)' is missing"),
        ('root ::= "a"{3,2}', "a maximum below its minimum"),
        ('root ::= "a"{x}', "expected a repetition"),
        ('root ::= TagDispatch(("a", b))', "macro 'TagDispatch'"),
        ('root ::= "\\q"', r"unknown escape \\q"),
        ("hello", "expected a rule"),
        ("", "no rule"),
        ("root ::= " + "(" * 300 + '"a"' + ")" * 300, "nested groups"),
    ],
)
def test_malformed_grammars_are_one_line_errors(text, message):
    with pytest.raises(GenerationConfigError, match=message) as error:
        parse_ebnf(text)
    assert "\n" not in str(error.value)


def test_rules_may_span_lines_and_have_comments():
    rules = parse_ebnf(
        """
        # a list
        root ::= item
               | item "," root   # more of them
        item ::= [a-z]+
                 "!"?
        """
    )
    assert set(rules) == {"root", "item"}
    assert regular_rules(rules) == {"item"}
    looped = without_tail_calls("root", rules["root"])
    assert not any(node == Reference("root") for node in walk(looped))
    assert any(isinstance(node, Repeat) for node in walk(looped))


def test_a_grammar_without_recursion_is_one_terminal():
    lark = lark_of(Grammar("ebnf", 'root ::= word "b"\nword ::= [a-z]*'))
    (start,) = re.findall(r"^start: (.*)$", lark, re.MULTILINE)
    assert re.fullmatch(r"T\d+", start)
    recursive = lark_of(Grammar("ebnf", 'root ::= "(" root ")" | "x"'))
    assert re.search(r"^start: r\d+$", recursive, re.MULTILINE)


def test_schemas_get_the_assumptions_of_strict_mode():
    inner = {"type": "object", "properties": {"x": {"format": "password", "type": "string"}}}
    schema = {"type": "object", "properties": {"a": inner, "b": {"type": "object"}}, "required": ["a"]}
    result = prepared(schema)
    assert result["additionalProperties"] is False
    assert result["properties"]["a"]["additionalProperties"] is False
    assert "additionalProperties" not in result["properties"]["b"], "an object that lists nothing is any object"
    assert "format" not in result["properties"]["a"]["properties"]["x"], "an annotation that nobody enforces"
    opened = prepared({**schema, "additionalProperties": True})
    assert opened["additionalProperties"] is True
    assert "additionalProperties" not in prepared({"allOf": [inner, {"properties": {"y": {}}}]})["allOf"][0]
    assert "additionalProperties" not in prepared({**inner, "required": ["other"]})
    same_name = prepared({"type": "object", "properties": {"allOf": {"type": "string"}}, "required": ["allOf"]})
    assert same_name["additionalProperties"] is False, "allOf is the name of a property here"
    named = prepared({"type": "object", "properties": {"format": {"type": "string"}, "properties": {"type": "null"}}})
    assert set(named["properties"]) == {"format", "properties"}
    assert prepared({"const": {"properties": {"a": 1}}})["const"] == {"properties": {"a": 1}}


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is no JSON"), ("3", "must be an object"), ("[]", "must be an object")]
)
def test_schemas_that_are_none_are_one_line_errors(text, message):
    with pytest.raises(GenerationConfigError, match=message):
        read_schema(text)


def tag(content, begin="<f>", end="</f>"):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY = {"type": "any_text"}
CONST = {"type": "const_string", "value": "abc"}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("{", "is no JSON"),
        ({"type": "spam"}, "format 'spam'"),
        ({"type": "sequence", "elements": []}, "must be a list that is not empty"),
        ({"type": "sequence", "elements": [ANY, CONST]}, "something after free text"),
        ({"type": "or", "elements": [ANY, CONST]}, "choice .or. of free text and other formats"),
        ({"type": "const_string"}, "without 'value'"),
        (tag(ANY, end=""), "empty end"),
        ({"type": "triggered_tags", "triggers": ["<g"], "tags": [tag(CONST)]}, "begins with 0 of the triggers"),
        ({"type": "triggered_tags", "triggers": ["<", "<f"], "tags": [tag(CONST)]}, "begins with 2 of the triggers"),
        ({"type": "qwen_xml_parameter", "json_schema": {"type": "string"}}, "an object with properties"),
        ({"type": "regex", "pattern": "(^a)"}, "leave anchors out"),
        ({"type": "grammar", "grammar": "x"}, "malformed at line 1"),
    ],
)
def test_malformed_structural_tags_are_one_line_errors(form, message):
    text = form if isinstance(form, str) else json.dumps({"type": "structural_tag", "format": form})
    with pytest.raises(GenerationConfigError, match=message) as error:
        lark_of(Grammar("structural_tag", text))
    assert "\n" not in str(error.value)


def test_grammars_from_another_process_are_checked():
    for kind in KINDS:
        Grammar(kind, "x").check()
    for grammar in (Grammar("spam", "x"), Grammar("regex", ""), Grammar("regex", 3), Grammar("regex", "x" * (1 << 23))):
        with pytest.raises(GenerationConfigError, match="a grammar"):
            grammar.check()


VOCABULARY = small_vocabulary()


def fewest(text):
    """Return the fewest tokens of a text, by trying all ways."""
    data, known = text.encode(), {token for id, token in enumerate(VOCABULARY.tokens) if id < END and token}
    costs = [0, *[math.inf] * len(data)]
    for end in range(1, len(data) + 1):
        costs[end] = min(costs[start] + 1 for start in range(end) if data[start:end] in known)
    return costs[-1]


@settings(deadline=None, max_examples=examples(200))
@given(texts=st.lists(st.text("abcdet hé日1", min_size=1, max_size=12), min_size=1, max_size=4))
def test_the_shortest_choice_is_found(texts):
    found = TokenBounds(VOCABULARY).fewest_tokens(Grammar("choice", json.dumps(texts)))
    assert found == min(map(fewest, texts))


@settings(deadline=None, max_examples=examples(200))
@given(
    before=st.text("abcd hé", max_size=6),
    text=st.text("abcd hé", min_size=1, max_size=8),
    after=st.text("abcd hé", max_size=6),
)
def test_no_text_needs_fewer_tokens_than_the_bound_of_its_part(before, text, after):
    assert TokenBounds(VOCABULARY).covering(text.encode()) <= fewest(before + text + after)


@pytest.mark.parametrize(
    ("grammar", "shortest"),
    [
        (Grammar("regex", "[0-9]{50}"), "123" * 16 + "12"),
        (Grammar("regex", "(ab|c)*x{70}"), "x" * 70),
        (
            Grammar(
                "json_schema", json.dumps({"type": "object", "properties": {"zzzzzz": {}}, "required": ["zzzzzz"]})
            ),
            '{"zzzzzz":1}',
        ),
        (Grammar("json_schema", json.dumps({"enum": ["xyzxyz", "qqqqqqqqqqq"]})), '"xyzxyz"'),
        (Grammar("ebnf", 'root ::= "(" root ")" | "xyzxyz"'), "xyzxyz"),
        (Grammar("structural_tag", json.dumps(tag(ANY, "<zz>", "</zz>"))), "<zz></zz>"),
    ],
)
def test_bounds_are_below_the_shortest_answer_and_not_trivial(grammar, shortest):
    bound = TokenBounds(VOCABULARY).fewest_tokens(grammar)
    assert 2 < bound <= fewest(shortest)


def test_a_grammar_without_an_end_has_an_infinite_bound():
    assert math.isinf(TokenBounds(VOCABULARY).fewest_tokens(Grammar("ebnf", 'root ::= "a" root')))
    loop = {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
    }
    assert math.isinf(TokenBounds(VOCABULARY).fewest_tokens(Grammar("json_schema", json.dumps(loop))))


class FakeTokenizer:
    """A tokenizer of the kind of SentencePiece: ``▁`` stands for a space, which a text's first token loses."""

    PIECES = ("<s>", "</s>", "<0x0A>", "<0xE6>", "▁a", "a", "▁", "b▁c", "é", "<0x>")

    def get_vocab(self):
        return {piece.encode(): id for id, piece in enumerate(self.PIECES)}

    def get_eos_token_id(self):
        return 1

    def decode(self, tokens, skip_special_tokens):
        return [self._text(row, skip_special_tokens) for row in tokens.data]

    def _text(self, row, skips):
        data = b""
        for id in row:
            piece = self.PIECES[id]
            if id < 2 and skips:
                continue
            byte = re.fullmatch("<0x(..)>", piece)
            data += bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
        return data.decode(errors="replace").removeprefix(" ")


def test_pieces_of_sentencepiece_become_bytes(monkeypatch):
    import sys
    import types

    monkeypatch.setitem(
        sys.modules, "openvino", types.SimpleNamespace(Tensor=lambda array: types.SimpleNamespace(data=array))
    )
    vocabulary = read_vocabulary(FakeTokenizer())
    assert vocabulary.tokens[2:] == (b"\n", b"\xe6", b" a", b"a", b" ", b"b c", "é".encode(), b"<0x>")
    assert vocabulary.special == {0, 1}
    assert vocabulary.end == 1


def test_the_test_vocabulary_encodes_exactly():
    for text in ("the name", '{"age": 12}', "日本é", "".join(WORDS)):
        assert b"".join(VOCABULARY.tokens[id] for id in encode(text)) == text.encode()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("ab(c", "missing \\), unterminated subpattern at position 2 of 'ab\\(c'"),
        ("[a-\nz]\n[z-a]", r"bad character range a-\\n at position 1"),
        ("a(?=b)c", "look-around.* is not supported: '\\(\\?=' at position 1"),
        (r"(a)b\1", "backreferences are not supported: .* at position 4"),
        ("a{3,2}", "min repeat greater than max repeat at position 2"),
    ],
)
def test_errors_of_a_regex_have_a_reason_and_a_position(pattern, message):
    pytest.importorskip("llguidance")
    with pytest.raises(GenerationConfigError, match=message) as error:
        compiler_of().matcher(Grammar("regex", pattern), OTHER_SPECIAL + 1)
    assert "\n" not in str(error.value)

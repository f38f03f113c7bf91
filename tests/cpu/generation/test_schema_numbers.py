"""Tests the bounds of numbers in JSON schemas against every text of a list, also where llguidance alone is wrong."""

import itertools
import json

import jsonschema
import pytest
from support.engine.grammars import OTHER_SPECIAL, WORDS, compiler_of

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.generation.grammar import Grammar
from staticllm.pipelines.generation.options.requested_grammar import requested_grammar

TOKENS = [(bytes([byte]), byte) for byte in range(256)] + [(word.encode(), 256 + i) for i, word in enumerate(WORDS)]
TEXTS = (
    "0", "-0", "0.0", "0.5", "0.4", "0.499", "0.001", "0.0005", "1", "1.0", "1.25", "1.5", "2", "10", "10.25", "10.5", "-1",
    "-1.0", "-1.2", "-1.5", "-0.5", "-0.25", "0.0000001", "-2", "9.5",
)  # fmt: skip
LOWER = (None, -1.5, -1, -0.5, 0, 0.001, 1, 10)
UPPER = (None, -1, -0.5, 0, 0.001, 0.5, 1, 1.5, 10, 10.5)


@pytest.fixture(scope="module")
def compiler():
    return compiler_of()


def accepts(compiler, schema, text):
    """Return whether a schema's grammar has a text, in any division into tokens."""
    start = compiler.matcher(Grammar("json_schema", json.dumps(schema)), OTHER_SPECIAL + 1)
    data = text.encode()

    def goes_on(matcher, place):
        if place == len(data):
            matcher.allowed()
            return matcher.can_end
        allowed = matcher.allowed()
        for word, token in TOKENS:
            if allowed[token] and data.startswith(word, place):
                following = matcher.clone()
                following.accept([token])
                if goes_on(following, place + len(word)):
                    return True
        return False

    return goes_on(start, 0)


def bounded():
    for (low, high), is_open, is_shut in itertools.product(
        itertools.product(LOWER, UPPER), (False, True), (False, True)
    ):
        if (low is None and high is None) or (low is not None and high is not None and low >= high):
            continue
        schema = {"type": "number"}
        if low is not None:
            schema["exclusiveMinimum" if is_open else "minimum"] = low
        if high is not None:
            schema["exclusiveMaximum" if is_shut else "maximum"] = high
        yield schema


def test_no_number_outside_of_its_bounds_is_written(compiler):
    schemas = {json.dumps(schema): schema for schema in bounded()}
    num_accepted = 0
    for schema in schemas.values():
        check = jsonschema.Draft202012Validator(schema)
        for text in TEXTS:
            if accepts(compiler, schema, text):
                assert check.is_valid(json.loads(text)), (schema, text)
                num_accepted += 1
    assert num_accepted > len(schemas)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]},
        {"type": "number", "exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}, {"minimum": 9}]},
        {"$defs": {"p": {"type": "number", "exclusiveMinimum": 0}}, "$ref": "#/$defs/p", "maximum": 0.5},
        {"type": ["number", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    ],
)
def test_bounds_of_several_parts_hold_together(compiler, schema):
    check = jsonschema.Draft202012Validator(schema)
    found = [text for text in TEXTS if accepts(compiler, schema, text)]
    assert "0.4" in found
    for text in found:
        assert check.is_valid(json.loads(text)), text


def test_integers_and_numbers_close_to_an_excluded_bound(compiler):
    assert accepts(compiler, {"type": "integer", "exclusiveMinimum": 0, "maximum": 2}, "1")
    assert not accepts(compiler, {"type": "integer", "exclusiveMinimum": 0, "maximum": 2}, "0")
    tiny = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-9}
    assert accepts(compiler, tiny, "0.0000000005")
    assert not accepts(compiler, tiny, "0")
    assert accepts(compiler, {"type": "number", "exclusiveMinimum": 0}, "0.000001")
    exact = {"type": "integer", "minimum": 2**53}
    assert accepts(compiler, exact, str(2**53))
    assert not accepts(compiler, exact, str(2**53 - 1))
    with pytest.raises(GenerationConfigError, match="the bounds of a number are too large"):
        accepts(compiler, {"type": "integer", "minimum": 2**60}, "1")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 1785239847529384001},
        {"type": "integer", "maximum": 10**30},
        {"type": "object", "properties": {"id": {"exclusiveMinimum": 2**53 + 1}}},
        {"const": 1785239847529384001},
        {"enum": [1, {"id": [2**63]}]},
        {"const": 10**400},
    ],
)
def test_numbers_that_are_not_exact_are_refused_in_one_line(compiler, schema):
    with pytest.raises(GenerationConfigError, match=r"a number must be below 2\^63 and exact") as caught:
        compiler.matcher(Grammar("json_schema", json.dumps(schema)), OTHER_SPECIAL + 1)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_grammar_that_is_too_complex_after_its_first_token_is_refused_when_it_is_compiled(compiler):
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(800)}}
    with pytest.raises(GenerationConfigError, match=r"\d+ choices at one place, \d+ are the most: use fewer optional"):
        compiler.matcher(Grammar("json_schema", json.dumps(schema)), OTHER_SPECIAL + 1)
    schema["required"] = list(schema["properties"])
    compiler.matcher(Grammar("json_schema", json.dumps(schema)), OTHER_SPECIAL + 1)


class Broken:
    @staticmethod
    def model_json_schema():
        raise LookupError("no type\nfor this field")


def test_a_model_that_makes_no_schema_is_refused_in_one_line():
    with pytest.raises(
        GenerationConfigError, match=r"json_schema=.*Broken.* makes no JSON schema: LookupError: no type$"
    ):
        requested_grammar({"json_schema": Broken}, {"structured_output_config": None, "ignore_eos": False})

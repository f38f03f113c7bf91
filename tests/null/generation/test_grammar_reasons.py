"""Tests what is said of grammars that cannot be compiled: one line with the place and the remedy, in words of ours."""

from __future__ import annotations

import json

import pytest
from support.engine.grammars import OTHER_SPECIAL, compiler_of

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.generation.grammar import Grammar

pytest.importorskip("llguidance")

FOREIGN = (
    "NoExtensionBias", "json-schema:///", "failed to compile", "Unimplemented", "Some(", "coerce_one_of", "llguidance",
    "serializable", "lookarounds not", "Expected", "f64", "retriever", "unrecognized flag", "WordUnicode", "stack level",
)  # fmt: skip
"""What llguidance says."""
SCHEMAS = [
    ({"$ref": "#"}, "'#' leads back to itself"),
    ({"$ref": ""}, "'#' leads back to itself"),
    ({"allOf": [{"$ref": "#"}]}, "'#' leads back to itself"),
    ({"$anchor": "x", "$ref": "#x"}, "'#' leads back to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "'#/$defs/"),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/a/b"}}, "$defs": {"a/b": {"$ref": "#/$defs/a~1b"}},
      "required": ["a"]}, ""),
    ({"anyOf": [{"$ref": "#/anyOf/1"}, {"$ref": "#/anyOf/0"}]}, "'#/anyOf/0'"),
    ({"allOf": [{"$ref": "#"}, {"type": "string"}]}, "leads back to itself"),
    ({"type": "string", "allOf": [{"$ref": "#/allOf/0"}]}, "lead back to themselves"),
    ({"$ref": "#/x"}, "'#/x' leads nowhere"),
    ({"$ref": "#foo"}, "'#foo' leads nowhere"),
    ({"$ref": "other.json"}, "'other.json' is another document"),
    ({"$ref": 5}, "$ref must be a string"),
    ({"type": "spam"}, "'spam' is unknown"),
    ({"type": []}, "an empty choice"),
    ({"enum": []}, "an empty choice"),
    ({"anyOf": [False]}, "each of its choices is false"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "different types"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "use anyOf"),
    ({"properties": {"a": {"items": {"not": {"const": 2}}}}}, "'not' at '#/properties/a/items' is not supported here: say"),
    ({"properties": {"not": {"if": {"const": 2}, "then": False}}}, "at '#/properties/not' is not supported here: write the"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems' at '#' is not supported here: leave it out (in pydantic, use list"),
    ({"type": "array", "contains": {"const": 1}}, "'contains' at '#' is not supported here: use minItems and maxItems"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "'propertyNames' at '#' is not supported here: list the names in"),
    ({"type": "object", "propertyNames": {"type": "string", "minLength": 1}}, "'propertyNames' at '#' is not supported here"),
    ({"type": "object", "propertyNames": 1}, "'propertyNames' at '#' is not supported here"),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, "'dependentSchemas' at '#' is not supported here"),
    ({"type": "object", "unevaluatedProperties": False}, "not supported here: use additionalProperties"),
    ({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["a", "b"]}]}, "oneOf at '#' with options that may hold"),
    ({"properties": {"a": {"oneOf": [{"multipleOf": 2}, {"minimum": 5}]}}}, "oneOf at '#/properties/a' with options"),
    ({"not": {}}, "nothing satisfies the JSON schema"),
    ({"$recursiveRef": "#"}, "'$recursiveRef' at '#'"),
    ({"minLength": "x"}, "whole number"),
    ({"type": "number", "minimum": "a"}, "must be a number"),
    ({"type": "integer", "multipleOf": 0}, "above 0"),
    ({"type": "number", "multipleOf": 1e-30}, "too many digits"),
    ({"type": "number", "minimum": 1e308}, "too large"),
    ({"maxLength": 10**12, "type": "string"}, "too large"),
    ({"required": [5]}, "must be of the type string"),
    ({"pattern": r"\ba\b", "type": "string"}, "leave it out"),
    ({"const": float("inf")}, "no JSON"),
    ({"enum": [float("nan")]}, "no JSON"),
]  # fmt: skip
TAGS = [
    ({"type": ["tag"]}, "a format ['tag']"),
    ({"type": "tags_with_separator", "tags": [5], "separator": ","}, "the tag 5"),
    ({"type": "triggered_tags", "triggers": ["x"], "tags": [5]}, "the tag 5"),
    ({"type": "triggered_tags", "triggers": 5, "tags": [{"begin": "x"}]}, "triggers"),
    ({"type": "json_schema", "json_schema": 5}, "is a int"),
    ({"type": "json_schema", "json_schema": {"type": "spam"}}, "'spam' is unknown"),
    ({"type": "grammar", "grammar": "root ::= root"}, "'root' needs itself"),
    ({"type": "const_string", "value": "\ud800"}, "half of a surrogate pair"),
]  # fmt: skip
TEXTS = [
    ("ebnf", "root ::= root", "'root' needs itself"),
    ("ebnf", 'root ::= "a" b\nb ::= c "x"\nc ::= "y" b', "way out"),
    ("ebnf", 'root ::= "a"{99999999999999999999}', "1048576"),
    ("ebnf", 'root ::= "\ud800"', "half of a surrogate pair"),
    ("regex", r"[^\s\S]", "no text matches it"),
    ("regex", r"(?P<x>a)(?P=x)", "begins with (?P"),
    ("regex", "a(?#c)b", "begins with (?#"),
    ("regex", "\ud800", "half of a surrogate pair"),
    ("lark", "start: start", "no text matches it"),
    ("lark", "start: foo", "line 1, column 8"),
    ("lark", 'start: %json {"type": "spam"}', "'spam' is unknown"),
]  # fmt: skip
GRAMMARS = [
    *((Grammar("json_schema", json.dumps(schema)), said) for schema, said in SCHEMAS),
    *((Grammar("structural_tag", json.dumps(tag)), said) for tag, said in TAGS),
    *((Grammar(kind, text), said) for kind, text, said in TEXTS),
]


@pytest.fixture(scope="module")
def compiler():
    return compiler_of()


@pytest.mark.parametrize(("grammar", "said"), GRAMMARS, ids=lambda each: str(getattr(each, "text", ""))[:60] or None)
def test_a_grammar_that_cannot_be_compiled_gets_one_line(compiler, grammar, said):
    with pytest.raises(GenerationConfigError) as caught:
        compiler.matcher(grammar, OTHER_SPECIAL + 1, 1000)
    message = str(caught.value)
    assert said in message
    assert "\n" not in message
    assert not [word for word in FOREIGN if word in message], message


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
        {"type": "array", "items": {"$ref": "#"}},
        {"properties": {"a": {"$ref": "#"}}},
        {"type": "string", "$defs": {"a": {"$ref": "#/$defs/a"}}},  # a circle that nothing uses
    ],
)
def test_references_to_the_whole_schema_that_end_are_compiled(compiler, schema):
    assert compiler.matcher(Grammar("json_schema", json.dumps(schema)), OTHER_SPECIAL + 1, 100).allowed().any()

"""Tests grammars that are made to cost time or memory: each is compiled or refused with one line, and soon."""

from __future__ import annotations

import time

import pytest
from openvino_genai import StructuredOutputConfig as Config

from staticllm.errors import GenerationConfigError
from staticllm.testing import fake_pipeline

pytest.importorskip("llguidance")
SECONDS = 15  # each takes less than 3 on a slow machine, and took minutes or more


@pytest.fixture(scope="module")
def pipe():
    with fake_pipeline(MIN_RESPONSE_LEN=256) as pipe:
        yield pipe


def nested(levels):
    schema = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def references(one_more):
    """Return a schema with 30 definitions, each of which has the next one twice: 2 ** 30 if all are followed."""
    names = {f"d{i}": one_more({"$ref": f"#/$defs/d{i + 1}"}) for i in range(30)}
    return {"$defs": {**names, "d30": {"type": "null"}}, "$ref": "#/$defs/d0"}


def chained(count, one_more):
    """Return a schema with a chain of definitions, each of which has the next one."""
    names = {f"d{i}": one_more({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$defs": {**names, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def circle(count):
    """Return a schema whose definitions refer to each other, from the last one to the first."""
    schema = chained(count, lambda ref: {"type": "array", "items": ref})
    return {**schema, "$defs": {**schema["$defs"], f"d{count}": {"$ref": "#/$defs/d0"}}}


def overlapping(count, values):
    """Return a schema with options that are compared in pairs, as they may hold together."""
    return {"oneOf": [{"enum": [*(f"{i} {j}" for j in range(values)), "x"]} for i in range(count)]}


def concatenated(levels):
    tag = Config.ConstString("a")
    for _ in range(levels):
        tag = Config.Concat(tag, Config.ConstString("b"))
    return tag


GRAMMARS = {
    "deep text": {"json_schema": '{"type": "array", "items":' * 900 + "{}" + "}" * 900},
    "deep dict": {"json_schema": nested(900)},
    "deep tag": {"grammar": concatenated(400)},
    "two properties": {
        "json_schema": references(
            lambda ref: {"type": "object", "properties": {"a": ref, "b": ref}, "required": ["a", "b"]}
        )
    },
    "two options": {"json_schema": references(lambda ref: {"anyOf": [ref, ref]})},
    "a chain of options": {"json_schema": chained(3000, lambda ref: {"anyOf": [ref, {"type": "integer"}]})},
    "a chain of properties": {
        "json_schema": chained(3000, lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]})
    },
    "a chain of references": {"json_schema": chained(20_000, lambda ref: ref)},
    "a chain of anchors": {
        "json_schema": {
            "$defs": {str(i): {"$anchor": f"x{i}", "anyOf": [{"$ref": f"#x{i + 1}"}]} for i in range(3000)},
            "$ref": "#x0",
        }
    },
    "a circle": {"json_schema": circle(3000)},
    "as many levels as are followed": {"json_schema": chained(140, lambda ref: {"anyOf": [ref, {"type": "integer"}]})},
    "options of objects": {
        "json_schema": {
            "oneOf": [
                {"type": "object", "properties": {f"a{i}": {"type": "integer"}}, "required": [f"a{i}"]}
                for i in range(6000)
            ]
        }
    },
    "options of many values": {"json_schema": overlapping(100, 500)},
    "options with many properties": {
        "json_schema": {"oneOf": [{"type": "object", "required": [f"{i:x}" for i in range(20_000)]}] * 2}
    },
    "options of constants": {"json_schema": {"oneOf": [{"const": i} for i in range(6000)]}},
    "long constant": {"json_schema": {"const": "ab" * 200_000}},
    "many rules": {
        "grammar": "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(9000)) + 'r9000 ::= "b"'
    },
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_costly_grammar_is_refused_or_compiled_soon(pipe, name):
    begin = time.monotonic()
    try:
        assert pipe.submit("x", max_new_tokens=150, **GRAMMARS[name]).outputs()
    except GenerationConfigError as refused:
        assert "\n" not in str(refused)
    assert time.monotonic() - begin < SECONDS
    assert pipe.generate(["x"], max_new_tokens=3).texts

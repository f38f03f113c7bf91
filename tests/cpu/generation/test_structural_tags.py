"""Tests structural tags on a small vocabulary: every answer has the form of its tag."""

import json
import re

import numpy as np
import pytest
from support.engine.grammars import END, OTHER_SPECIAL, compiler_of, encode, mask_of, random_answer, text_of

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.conversation.formats import MessageFormat
from staticllm.pipelines.conversation.required_calls import required_calls
from staticllm.pipelines.generation.grammar import Grammar
from staticllm.pipelines.generation.options.extra import extra_options

pytest.importorskip("llguidance")
VOCAB = OTHER_SPECIAL + 1
COMPILER = compiler_of()


def allowed_tokens(mask):
    logits = np.zeros(VOCAB, np.float32)
    mask.process(logits)
    return set(np.flatnonzero(np.isfinite(logits)).tolist())


def tag(content, begin="<f>", end="</f>"):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(text):
    return {"type": "const_string", "value": text}


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
}
TAGS = [tag(const("A")), tag(const("B"))]
FREE = "(?s:(?!<f).)*"


def is_json_in_tag(text):
    value = json.loads(text.removeprefix("<f>").removesuffix("</f>"))
    return set(value) == {"name", "age"} and 0 <= value["age"] <= 99 and len(value["name"]) <= 5


@pytest.mark.parametrize(
    ("form", "is_right"),
    [
        (const("abc"), "abc".__eq__),
        (tag(const("...")), "<f>...</f>".__eq__),
        (tag({"type": "json_schema", "json_schema": SCHEMA}), is_json_in_tag),
        (
            {"type": "sequence", "elements": [const("a"), {"type": "regex", "pattern": "a*"}, const("b")]},
            re.compile("a+b").fullmatch,
        ),
        ({"type": "or", "elements": [const("a"), const("b"), tag(const("c"))]}, {"a", "b", "<f>c</f>"}.__contains__),
        (
            {"type": "tags_with_separator", "tags": TAGS, "separator": ";", "at_least_one": True},
            re.compile("<f>[AB]</f>(;<f>[AB]</f>)*").fullmatch,
        ),
        (
            {"type": "tags_with_separator", "tags": TAGS, "separator": ";", "stop_after_first": True},
            re.compile("(<f>[AB]</f>)?").fullmatch,
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<f"],
                "tags": TAGS,
                "at_least_one": True,
                "stop_after_first": True,
            },
            re.compile("<f>[AB]</f>").fullmatch,
        ),
        (
            {"type": "triggered_tags", "triggers": ["<f"], "tags": TAGS},
            re.compile(f"({FREE}<f>[AB]</f>)*{FREE}").fullmatch,
        ),
        (
            {"type": "triggered_tags", "triggers": ["<f"], "tags": TAGS, "stop_after_first": True},
            re.compile(f"{FREE}(<f>[AB]</f>)?").fullmatch,
        ),
        (tag({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}), re.compile(r"<f>\(*x\)*</f>").fullmatch),
        ({"type": "plus", "content": const("ab")}, re.compile("(ab)+").fullmatch),
        (
            {
                "type": "qwen_xml_parameter",
                "json_schema": {
                    "type": "object",
                    "required": ["a", "b"],
                    "properties": {
                        "a": {"enum": ["yes", "no"], "type": "string"},
                        "b": {"type": "string", "pattern": "^[A-Z]{2}$"},
                    },
                },
            },
            re.compile(
                r'\s*<parameter=a>\s*"(yes|no)"\s*</parameter>\s*<parameter=b>[A-Z]{2}</parameter>\s*'
            ).fullmatch,
        ),
    ],
    ids=[
        "const",
        "tag",
        "json",
        "sequence",
        "or",
        "separated",
        "separated_one",
        "one_tag",
        "triggered",
        "triggered_first",
        "grammar",
        "plus",
        "xml",
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_every_answer_has_the_form_of_its_structural_tag(form, is_right, seed):
    grammar = Grammar("structural_tag", json.dumps(form))
    tokens = random_answer(COMPILER, grammar, seed, num_free=40, prepares=True)
    assert tokens is not None, "the answer did not end"
    assert is_right(text_of(COMPILER, tokens)), text_of(COMPILER, tokens)


def test_free_text_in_a_tag_ends_with_the_first_of_its_ends():
    mask = mask_of(COMPILER, Grammar("structural_tag", json.dumps(tag({"type": "any_text"}, end=["</f>", "</g>"]))))
    for token in encode("<f>some text < and </ more </g"):
        assert END not in allowed_tokens(mask)
        mask.accept(token)
    assert ord("x") in allowed_tokens(mask), "it is no end yet"
    mask.accept(ord(">"))
    assert allowed_tokens(mask) == {END}


def test_the_text_of_a_special_token_in_a_structural_tag_is_the_token():
    form = tag({"type": "any_text"}, begin="a<other>", end="<other>b")
    grammar = Grammar("structural_tag", json.dumps(form))
    mask = mask_of(COMPILER, grammar, max_new_tokens=4)
    for token in (ord("a"), OTHER_SPECIAL, *encode("text with <other")):
        assert token in allowed_tokens(mask)
        mask.accept(token)
    assert OTHER_SPECIAL in allowed_tokens(mask)
    assert END not in allowed_tokens(mask)
    for token in (OTHER_SPECIAL, ord("b")):
        assert token in allowed_tokens(mask)
        mask.accept(token)
    assert allowed_tokens(mask) == {END}
    plain = mask_of(COMPILER, Grammar("choice", '["<other>"]'))
    assert OTHER_SPECIAL not in allowed_tokens(plain), "only structural tags mean tokens"


@pytest.mark.parametrize(
    "form",
    [
        {"type": "plain_string", "value": "<other>"},
        {"type": "string", "json_schema": {"const": "<other>"}, "excluded": "</f>"},
        {"type": "string", "json_schema": {"enum": ["<other>"], "maxLength": 9}, "excluded": "</f>"},
    ],
)
def test_plain_strings_have_no_special_tokens(form):
    mask = mask_of(COMPILER, Grammar("structural_tag", json.dumps(tag(form))))
    for token in encode("<f><other></f>"):
        assert OTHER_SPECIAL not in allowed_tokens(mask)
        assert token in allowed_tokens(mask)
        mask.accept(token)
    assert allowed_tokens(mask) == {END}


def test_a_name_of_a_parameter_in_xml_has_no_special_tokens():
    schema = {"type": "object", "properties": {"<other>": {"type": "integer"}}, "required": ["<other>"]}
    mask = mask_of(
        COMPILER, Grammar("structural_tag", json.dumps({"type": "qwen_xml_parameter", "json_schema": schema}))
    )
    for token in encode("<parameter=<other>>5"):
        assert OTHER_SPECIAL not in allowed_tokens(mask)
        assert token in allowed_tokens(mask)
        mask.accept(token)


def test_a_trigger_in_free_text_must_be_followed_by_one_of_its_tags():
    form = {"type": "triggered_tags", "triggers": ["<f"], "tags": TAGS}
    mask = mask_of(COMPILER, Grammar("structural_tag", json.dumps(form)))
    for token in b"hello <":
        assert token in allowed_tokens(mask)
        assert END in allowed_tokens(mask), "free text may end anywhere"
        mask.accept(token)
    mask.accept(ord("f"))
    assert allowed_tokens(mask) == {ord(">")}


INTEGERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


@pytest.mark.parametrize(
    "keywords",
    [
        {"minProperties": 1}, {"maxProperties": 1}, {"dependentRequired": {"a": ["b"]}}, {"not": {"required": ["a"]}},
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"required": ["c"], "additionalProperties": False},
        {"type": "array"}, {"properties": {"a": False}, "required": ["a"]}, {"properties": {"a": 5}}, {"const": {}},
    ],
)  # fmt: skip
def test_what_parameters_in_xml_cannot_say_gets_one_line(keywords):
    form = {"type": "qwen_xml_parameter", "json_schema": {**INTEGERS, **keywords}}
    with pytest.raises(GenerationConfigError, match=r"parameters in XML (have|require) ") as caught:
        mask_of(COMPILER, Grammar("structural_tag", json.dumps(form)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({**INTEGERS, "required": ["c"]}, "<parameter=c>true</parameter>"),
        ({"$ref": "#/$defs/p", "$defs": {"p": {**INTEGERS, "required": ["a"]}}}, "<parameter=a>5</parameter>"),
        ({**INTEGERS, "allOf": [{"required": ["b"]}]}, "<parameter=b>5</parameter>"),
        (
            {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"enum": [7]}}, "required": ["a"]},
            "<parameter=a>7</parameter>",
        ),
        ({**INTEGERS, "minProperties": 0, "maxProperties": 2, "title": "t", "additionalProperties": True}, ""),
        ({"properties": {"a": False}}, ""),
        (
            {"properties": {"a": {"type": "string", "anyOf": [{"const": "x"}]}}, "required": ["a"]},
            '<parameter=a>"x"</parameter>',
        ),
    ],
)
def test_what_parameters_in_xml_can_say(schema, text):
    mask = mask_of(
        COMPILER, Grammar("structural_tag", json.dumps({"type": "qwen_xml_parameter", "json_schema": schema}))
    )
    for token in encode(text):
        assert END not in allowed_tokens(mask)
        assert token in allowed_tokens(mask)
        mask.accept(token)
    assert END in allowed_tokens(mask)


@pytest.mark.parametrize("required", [[], ["b"]])
@pytest.mark.parametrize("given", [[], ["a"], ["b"], ["c"], ["a", "b"], ["a", "c"], ["b", "c"], ["a", "b", "c"]])
def test_any_of_the_optional_arguments_in_python_may_be_there(required, given):
    parameters = {"type": "object", "properties": {key: {"const": 5} for key in "abc"}, "required": required}
    tools = [{"name": "f", "parameters": parameters}]
    options = extra_options({"tools": tools, "tool_choice": "required"}, False).tool_options
    tag = required_calls(MessageFormat("python"), options)
    mask = mask_of(COMPILER, Grammar("structural_tag", json.dumps(tag)))
    names = [*required, *(name for name in given if name not in required)]
    for token in encode(f"[f({', '.join(f'{name}=5' for name in names)})]"):
        assert token in allowed_tokens(mask)
        mask.accept(token)
    assert allowed_tokens(mask) == {END}

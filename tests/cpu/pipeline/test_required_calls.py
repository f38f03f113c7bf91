"""Tests ``tool_choice``: a model that never calls anything must write a call that satisfies the function's schema."""

from __future__ import annotations

import json
import uuid

import openvino_genai as genai
import pytest
from support import calls

from staticllm import GenerationConfigError, StaticLLMPipeline, demo_model_path

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("shared_programs")

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "parameters": TIME}},
]
BEGIN = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
TEMPLATES = {
    "hermes": BEGIN + '{# <tool_call>{"name": "f", "arguments": {}}</tool_call> #}',
    "xml": calls.XML,
    "llama": BEGIN + '{# <|python_tag|> {"name": "f", "parameters": {}} #}',
    "pythonic": BEGIN + "{# <|python_start|> [f(x=1)] #}",
    "mistral": BEGIN + '{# [TOOL_CALLS] [{"name": "f", "arguments": {}}] #}',
    "glm": calls.GLM,
    "deepseek": calls.DEEPSEEK,
    "deepseek31": calls.DEEPSEEK_31,
    "minicpm": BEGIN + "{# <|tool_call_start|> ```python f() #}",
    "functionary": BEGIN + "{# >>>all #}>>>",
    "functionary31": calls.FUNCTION_JSON,
}


@pytest.fixture(scope="module")
def pipes(shared_programs):
    made = {}
    for name, template in TEMPLATES.items():
        tokenizer = genai.Tokenizer(str(demo_model_path()))
        tokenizer.chat_template = template
        made[name] = StaticLLMPipeline(demo_model_path(), "CPU", tokenizer=tokenizer)
    yield made
    for pipe in made.values():
        pipe.close()


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_required_call_satisfies_a_schema(pipes, name, seed):
    result = pipes[name].generate(
        "How is the weather?", tools=TOOLS, tool_choice="required", do_sample=True, temperature=1.5, rng_seed=seed,
        max_new_tokens=300,
    )  # fmt: skip
    assert result.tool_calls[0], str(result)
    for call in result.tool_calls[0]:
        schema = {"weather": CITY, "time": TIME}[call.name]
        jsonschema.validate(json.loads(call.arguments), schema)
    assert result.finish_reasons == ["tool_call"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_named_function_is_called(pipes, name):
    choice = {"type": "function", "function": {"name": "time"}}
    result = pipes[name].generate("Hello", tools=TOOLS, tool_choice=choice, max_new_tokens=200)
    assert [call.name for call in result.tool_calls[0]] == ["time"]
    assert result.tool_calls[0][0].parsed_arguments["zone"] in ("UTC", "CET")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"regex": "a"}, "tool_choice='required' with a grammar"),
        ({"ignore_eos": True}, "tool_choice='required' with ignore_eos"),
        ({"parse_tools": False}, "tool_choice='required' with parse_tools=False"),
    ],
)
def test_contradictions_get_one_line(pipes, options, message):
    with pytest.raises(GenerationConfigError, match=message):
        pipes["hermes"].generate("Hello", tools=TOOLS, tool_choice="required", max_new_tokens=99, **options)


def call_of(pipe, parameters, **options):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    options = {"tool_choice": "required", "parallel_tool_calls": False, "max_new_tokens": 250, **options}
    result = pipe.generate("Call.", tools=tools, **options)
    assert [str(reason) for reason in result.finish_reasons] == ["tool_call"]
    (call,) = result.tool_calls[0]
    return json.loads(call.arguments)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "value",
    [
        {"type": "string", "enum": ["metric", "imperial"]},
        {"type": "string", "const": "metric"},
        {"$ref": "#/$defs/unit"},
    ],
)
def test_arguments_are_one_of_the_texts_that_a_schema_lists(pipes, name, value):
    """In XML, texts have no quotes. References lead to the definitions of the whole schema, as pydantic writes them."""
    parameters = {
        "type": "object", "properties": {"unit": value}, "required": ["unit"],
        "$defs": {"unit": {"enum": ["metric", "imperial"]}},
    }  # fmt: skip
    jsonschema.validate(call_of(pipes[name], parameters), parameters)


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("name", ["xml", "glm", "hermes"])
@pytest.mark.parametrize(
    "value",
    [
        {"type": "string", "pattern": "^[a-z]{2,4}$"},
        {"type": "string", "pattern": "[0-9]{2}", "maxLength": 6},
        {"type": "string", "pattern": "^a|b$", "minLength": 2, "maxLength": 5},
        {"type": "string", "minLength": 3, "maxLength": 5},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "uuid"},
        {"type": "string", "format": "hat-size", "maxLength": 4},
    ],
)
def test_texts_without_quotes_satisfy_their_keywords_too(pipes, name, value, seed):
    parameters = {"type": "object", "properties": {"unit": value}, "required": ["unit"]}
    found = call_of(pipes[name], parameters, do_sample=True, temperature=1.5, rng_seed=seed)
    jsonschema.validate(found, parameters, format_checker=jsonschema.FormatChecker(["date"]))
    if value.get("format") == "uuid":
        uuid.UUID(found["unit"])


@pytest.mark.parametrize("name", ["xml", "glm"])
@pytest.mark.parametrize(
    "value",
    [
        {"pattern": "("}, {"pattern": "a\\bc"}, {"pattern": 5}, {"minLength": 3, "maxLength": 2}, {"minLength": "3"},
        {"maxLength": -1}, {"pattern": "^a{3}$", "maxLength": 2},
    ],
)  # fmt: skip
def test_keywords_that_nothing_satisfies_get_one_line(pipes, name, value):
    with pytest.raises(GenerationConfigError) as caught:
        call_of(
            pipes[name], {"type": "object", "properties": {"unit": {"type": "string", **value}}, "required": ["unit"]}
        )
    assert "\n" not in str(caught.value)
    assert str(pipes[name].generate("Hello", max_new_tokens=2))


@pytest.mark.parametrize("name", ["xml", "glm"])
@pytest.mark.parametrize(
    "value", [{"enum": [""]}, {"enum": ["abcd", "de"], "maxLength": 2}, {"enum": ["a", "b1"], "pattern": "1"}]
)
def test_texts_of_a_list_satisfy_the_other_keywords_too(pipes, name, value):
    parameters = {"type": "object", "properties": {"unit": {"type": "string", **value}}, "required": ["unit"]}
    jsonschema.validate(call_of(pipes[name], parameters), parameters)


@pytest.mark.parametrize("name, end", [("xml", "</parameter>"), ("glm", "</arg_value>")])
@pytest.mark.parametrize("keyword", ["const", "enum", "pattern"])
def test_texts_with_the_tag_that_ends_a_value_get_one_line(pipes, name, end, keyword):
    value = {"type": "string", keyword: ["fine", f"a{end}b"] if keyword == "enum" else f"a{end}b"}
    with pytest.raises(GenerationConfigError, match=f"{keyword} has 'a{end}b'.*use tool_choice='auto'") as caught:
        call_of(pipes[name], {"type": "object", "properties": {"unit": value}, "required": ["unit"]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", TEMPLATES)
def test_json_may_contain_the_tag_that_ends_a_value(pipes, name):
    text = "a</parameter>\n<parameter=b></arg_value></function>"
    value = {"type": "array", "items": {"const": text}, "minItems": 2, "maxItems": 2}
    parameters = {"type": "object", "properties": {"unit": value}, "required": ["unit"], "additionalProperties": False}
    assert call_of(pipes[name], parameters) == {"unit": [text, text]}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", ["a<|assistant|>b", "<s>", "<tool_call></tool_call>"])
def test_texts_of_a_tool_are_no_special_tokens(pipes, name, text):
    value = {"type": "string", "enum": [text]}
    parameters = {"type": "object", "properties": {"unit": value}, "required": ["unit"], "additionalProperties": False}
    assert call_of(pipes[name], parameters) == {"unit": text}


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
@pytest.mark.parametrize("function", ["a<s>b", "<|assistant|>", 'a"\\<s>'])
def test_names_of_functions_are_no_special_tokens(pipes, name, function):
    tools = [{"type": "function", "function": {"name": function, "parameters": TIME}}]
    result = pipes[name].generate(
        "Call.", tools=tools, tool_choice="required", parallel_tool_calls=False, max_new_tokens=99
    )
    assert [call.name for call in result.tool_calls[0]] == [function]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_required_call_that_a_stop_string_ends_is_content(pipes, name):
    tools = [{"type": "function", "function": {"name": "f", "parameters": TIME}}]
    result = pipes[name].generate(
        "Call.", tools=tools, tool_choice="required", max_new_tokens=200, stop_strings=["UTC", "CET"]
    )
    assert [str(reason) for reason in result.finish_reasons] == ["stop"]
    assert result.tool_calls == [[]]
    assert result.messages[0].content.strip() == result.texts[0].strip()


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("parameters", [{"properties": 5}, {"properties": {"a": {}}, "required": 5}])
def test_parameters_of_a_wrong_type_are_refused(pipes, name, parameters):
    with pytest.raises(GenerationConfigError) as caught:
        call_of(pipes[name], parameters)
    assert "\n" not in str(caught.value)
    assert str(pipes[name].generate("Hello", max_new_tokens=2))


FLAG = {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "parameters",
    [
        FLAG,
        {**FLAG, "type": ["object", "null"]},
        {"type": ["string", "object"], **FLAG},
    ],
)
def test_arguments_are_an_object_where_the_schema_allows_other_values_too(pipes, name, parameters):
    assert set(call_of(pipes[name], parameters)) == {"a"}


@pytest.mark.parametrize("name", ["hermes", "functionary31"])
def test_arguments_of_any_kind_are_an_object_too(pipes, name):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    result = pipes[name].generate(
        "Call.", tools=tools, tool_choice="required", parallel_tool_calls=False, max_new_tokens=60
    )
    (call,) = result.tool_calls[0]
    assert call.arguments.startswith("{")


WITHOUT_AN_OBJECT = ("xml", "glm", "pythonic", "minicpm")
"""Formats in which the arguments are no JSON object, so that only the parameters can be enforced."""
TWO = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": [7, 8]}}}
ONE_OF_TWO = [{"required": ["a"]}, {"required": ["b"]}]


@pytest.mark.parametrize("name", WITHOUT_AN_OBJECT)
@pytest.mark.parametrize(
    "keywords",
    [
        {"oneOf": ONE_OF_TWO}, {"anyOf": ONE_OF_TWO}, {"not": {"required": ["a"]}}, {"const": {"a": True}},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"minProperties": 1}, {"maxProperties": 1},
        {"dependentRequired": {"a": ["b"]}}, {"additionalProperties": {"type": "integer"}}, {"allOf": [{"oneOf": ONE_OF_TWO}]},
        {"$ref": "#/$defs/c", "$defs": {"c": {"minProperties": 1}}}, {"patternProperties": {"a": False}},
        {"propertyNames": {"const": "a"}}, {"$ref": "#/$defs/missing"}, {"$ref": "#"}, {"allOf": 5},
        {"allOf": [{"properties": {"c": {}}, "additionalProperties": False}]},
    ],
)  # fmt: skip
def test_what_a_format_without_an_object_cannot_enforce_gets_one_line(pipes, name, keywords):
    with pytest.raises(
        GenerationConfigError, match=r"the parameters of the tool 'f' have .*use tool_choice='auto'"
    ) as caught:
        call_of(pipes[name], {**TWO, **keywords})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", WITHOUT_AN_OBJECT)
@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"required": ["c"], "additionalProperties": False}, "require 'c', which properties lacks"),
        ({"properties": {"a": False}, "required": ["a"]}, "require 'a', whose schema is false"),
        ({"properties": {"a": 1}}, "have 'a' with the schema 1"),
        ({"properties": {"a": None}, "required": ["a"]}, "have 'a' with the schema None"),
        ({"required": [5]}, "have properties or required of a wrong type"),
    ],
)
def test_parameters_that_nothing_satisfies_get_one_line(pipes, name, keywords, message):
    with pytest.raises(GenerationConfigError, match=f"the parameters of the tool 'f' {message}") as caught:
        call_of(pipes[name], {**TWO, **keywords})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/p", "$defs": {"p": {**TWO, "required": ["a"], "additionalProperties": False}}},
        {**TWO, "required": ["b"], "description": "d", "$id": "http://x.org/y", "strict": True, "minProperties": 1},
        {**TWO, "properties": {"a": {"$ref": "#/properties/b"}, "b": {"enum": [7, 8]}}, "required": ["a"]},
        {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}, "b": {"const": 7}},
            "required": ["a", "b"], "additionalProperties": False,
        },
        {
            "type": "object", "required": ["b"], "properties": {"b": {"$ref": "#/$defs/q"}}, "additionalProperties": False,
            "$defs": {"q": {"anyOf": [{"$ref": "#/$defs/r"}]}, "r": {"const": 4}},
        },
        {**FLAG, "properties": {"a": {"type": "string", "anyOf": [{"const": "x"}, {"const": "12"}]}}},
    ],
)  # fmt: skip
def test_what_all_formats_can_enforce(pipes, name, parameters):
    found = call_of(pipes[name], parameters)
    jsonschema.validate(found, {key: value for key, value in parameters.items() if key != "$id"})
    assert found


@pytest.mark.parametrize("name", WITHOUT_AN_OBJECT)
def test_parameters_of_all_of_are_listed(pipes, name):
    more = {"properties": {"c": {"type": "string", "const": "5"}}, "required": ["c"]}
    parameters = {"allOf": [{**TWO, "required": ["a"]}, more, {"type": "object"}]}
    found = call_of(pipes[name], parameters)
    jsonschema.validate(found, parameters)
    assert found["c"] == "5"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("type", ["array", ["null", "string"], [], 5])
def test_parameters_that_are_no_object_get_one_line(pipes, name, type):
    with pytest.raises(
        GenerationConfigError, match=r"the parameters of the tool 'f' have type=.*: must be 'object'"
    ) as caught:
        call_of(pipes[name], {"type": type})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, function, parameter",
    [("pythonic", "get-weather", "a"), ("pythonic", "time", "a-b"), ("xml", "two words", "a"), ("xml", "time", "a>b")],
)
def test_names_that_a_format_cannot_write_get_one_line(pipes, name, function, parameter):
    tool = {"name": function, "parameters": {"type": "object", "properties": {parameter: {"type": "integer"}}}}
    with pytest.raises(GenerationConfigError, match="cannot be written in the model's format of calls") as caught:
        pipes[name].generate("Hello", tools=[{"type": "function", "function": tool}], tool_choice="required")
    assert "\n" not in str(caught.value)


def tools_with_a_note(least, most):
    text = {"type": "string", "minLength": least, "maxLength": most}
    parameters = {"type": "object", "properties": {"note": text}, "required": ["note"], "additionalProperties": False}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "most, max_new_tokens",
    [
        pytest.param(100, 64, marks=pytest.mark.slow),
        (100, 160),
        pytest.param(1200, 160, marks=pytest.mark.slow),
        pytest.param(20_000, 160, marks=pytest.mark.slow),
    ],
)
def test_a_required_call_is_whole_within_its_tokens(pipes, name, most, max_new_tokens):
    """The model would write the note to its longest length."""
    if max_new_tokens < 160 and name.startswith("deepseek"):
        pytest.skip("the tags of a call have more tokens")
    result = pipes[name].generate(
        "Call.", tools=tools_with_a_note(1, most), tool_choice="required", max_new_tokens=max_new_tokens,
        parallel_tool_calls=False, do_sample=True, rng_seed=1, temperature=1.0,
    )  # fmt: skip
    assert [str(reason) for reason in result.finish_reasons] == ["tool_call"]
    (call,) = result.tool_calls[0]
    assert len(json.loads(call.arguments)["note"]) >= 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_required_call_at_the_limit_of_tokens_keeps_its_beginning(pipes, name):
    """As in OpenAI's API, the finish reason is ``length``, and the call has the arguments so far."""
    asked = {"tools": tools_with_a_note(600, 1200), "tool_choice": "required", "parallel_tool_calls": False}
    asked["max_new_tokens"] = 160
    with pytest.raises(GenerationConfigError, match="max_new_tokens=160 leaves no room") as caught:
        pipes[name].generate("Call.", **asked)
    assert "\n" not in str(caught.value)
    result = pipes[name].generate("Call.", finish_grammar=0, **asked)
    assert [str(reason) for reason in result.finish_reasons] == ["length"]
    (call,) = result.tool_calls[0]
    assert call.name == "f"
    assert result.messages[0].content == ""
    assert call.arguments.replace(" ", "").replace("\n", "").startswith('{"note":"') or name in ("pythonic", "minicpm")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_required_call_for_which_there_is_no_room_is_refused(pipes, name):
    with pytest.raises(GenerationConfigError, match="max_new_tokens=3 leaves no room") as caught:
        pipes[name].generate("Hello", tools=TOOLS, tool_choice="required", max_new_tokens=3)
    assert "\n" not in str(caught.value)

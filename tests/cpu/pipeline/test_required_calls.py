"""Tests ``tool_choice``: a model that never calls anything must write a call that satisfies the function's schema."""

from __future__ import annotations

import json

import openvino_genai as genai
import pytest

from staticllm import GenerationConfigError, StaticLLMPipeline, demo_model_path

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

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
    "xml": BEGIN + "{# <tool_call><function=f><parameter=x>1</parameter></function></tool_call> #}",
    "llama": BEGIN + '{# <|python_tag|> {"name": "f", "parameters": {}} #}',
    "pythonic": BEGIN + "{# <|python_start|> [f(x=1)] #}",
    "mistral": BEGIN + '{# [TOOL_CALLS] [{"name": "f", "arguments": {}}] #}',
}


@pytest.fixture(scope="module")
def pipes():
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
    tools = TOOLS[1:] if name == "xml" else TOOLS  # a text of the XML format ends where the model ends it
    result = pipes[name].generate(
        "How is the weather?", tools=tools, tool_choice="required", do_sample=True, temperature=1.5, rng_seed=seed,
        max_new_tokens=300,
    )  # fmt: skip
    calls = result.tool_calls[0]
    assert calls, str(result)
    for call in calls:
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
        ({"num_beams": 2}, "tool_choice='required' with num_beams"),
        ({"ignore_eos": True}, "tool_choice='required' with ignore_eos"),
        ({"parse_tools": False}, "tool_choice='required' with parse_tools=False"),
    ],
)
def test_contradictions_get_one_line(pipes, options, message):
    with pytest.raises(GenerationConfigError, match=message):
        pipes["hermes"].generate("Hello", tools=TOOLS, tool_choice="required", max_new_tokens=99, **options)


def call_of(pipe, parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    result = pipe.generate("Call.", tools=tools, tool_choice="required", max_new_tokens=80)
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


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("parameters", [{"properties": 5}, {"properties": {"a": {}}, "required": 5}])
def test_parameters_of_a_wrong_type_are_refused(pipes, name, parameters):
    with pytest.raises(GenerationConfigError) as caught:
        call_of(pipes[name], parameters)
    assert "\n" not in str(caught.value)
    assert str(pipes[name].generate("Hello", max_new_tokens=2))


@pytest.mark.parametrize(
    "name, function, parameter",
    [("pythonic", "get-weather", "a"), ("pythonic", "time", "a-b"), ("xml", "two words", "a"), ("xml", "time", "a>b")],
)
def test_names_that_a_format_cannot_write_get_one_line(pipes, name, function, parameter):
    tool = {"name": function, "parameters": {"type": "object", "properties": {parameter: {"type": "integer"}}}}
    with pytest.raises(GenerationConfigError, match="cannot be written in the model's format of calls") as caught:
        pipes[name].generate("Hello", tools=[{"type": "function", "function": tool}], tool_choice="required")
    assert "\n" not in str(caught.value)

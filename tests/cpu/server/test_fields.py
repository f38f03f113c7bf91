"""The fields of requests: whole numbers in any form, unknown fields of messages, and messages as chat templates take them."""

from __future__ import annotations

import pytest

for package in ("fastapi", "pydantic"):
    pytest.importorskip(package)

from pydantic import ValidationError  # noqa: E402

from staticllm.server.answers.fields import Fields, _takes_integers  # noqa: E402
from staticllm.server.answers.messages import template_messages  # noqa: E402
from staticllm.server.anthropic.fields import MessagesRequest  # noqa: E402
from staticllm.server.ollama.fields import OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest  # noqa: E402
from staticllm.server.ollama.generation import template_messages as ollama_messages  # noqa: E402
from staticllm.server.openai.chat import ChatRequest  # noqa: E402
from staticllm.server.openai.completions import CompletionRequest  # noqa: E402
from staticllm.server.openai.encoders import EmbeddingsRequest, RerankRequest  # noqa: E402
from staticllm.server.openai.infill import InfillRequest  # noqa: E402
from staticllm.server.openai.tokens import DetokenizeRequest  # noqa: E402
from staticllm.server.responses.fields import ResponsesRequest  # noqa: E402
from staticllm.server.responses.items import messages_of  # noqa: E402

USER = {"role": "user", "content": "a"}
NUMBERS = {"OpenaiNumbers", "OllamaNumbers", "ResponsesNumbers"}
LEAST = {
    ChatRequest: {"messages": [USER]}, CompletionRequest: {"prompt": "a"}, ResponsesRequest: {"input": "a"},
    EmbeddingsRequest: {"input": "a"}, RerankRequest: {"query": "a", "documents": ["a"]}, DetokenizeRequest: {"tokens": [1]},
    InfillRequest: {}, MessagesRequest: {"model": "a", "max_tokens": 1, "messages": [USER]},
    OllamaChatRequest: {"model": "a"}, OllamaGenerateRequest: {"model": "a"}, OllamaEmbedRequest: {"model": "a", "input": "a"},
}  # fmt: skip


def kinds(kind=Fields):
    for each in kind.__subclasses__():
        yield each
        yield from kinds(each)


def integers(kind):
    return [name for name, field in kind.model_fields.items() if _takes_integers(field.annotation)]


def test_every_body_with_whole_numbers_is_looked_at():
    with_numbers = {kind.__name__ for kind in kinds() if integers(kind) and kind.__module__.startswith("staticllm.")}
    known = {kind.__name__ for kind in LEAST} | {"SamplingFields", "OllamaOptions", "OllamaGeneration"} | NUMBERS
    assert with_numbers <= known


@pytest.mark.parametrize("kind", LEAST)
def test_whole_numbers_may_be_written_as_12_0(kind):
    for name in integers(kind):
        for value in (0, 1, 2, -1):
            try:
                expected = getattr(kind.model_validate({**LEAST[kind], name: value}), name)
            except ValidationError:
                with pytest.raises(ValidationError):
                    kind.model_validate({**LEAST[kind], name: float(value)})
            else:
                found = getattr(kind.model_validate({**LEAST[kind], name: float(value)}), name)
                assert found == expected
                assert isinstance(found, int)
        for value in (12.5, float("inf"), float("nan"), 1e300, True, "12"):
            if not (isinstance(value, str) and name in ("prompt", "input")):
                with pytest.raises(ValidationError):
                    kind.model_validate({**LEAST[kind], name: value})


@pytest.mark.parametrize("prompt", [[1.0, 2], [[1.0], [2, 3.0]]])
def test_token_ids_are_whole_numbers_too(prompt):
    found = CompletionRequest.model_validate({"prompt": prompt}).prompt
    assert found == prompt
    assert "." not in str(found)
    assert DetokenizeRequest.model_validate({"tokens": [5.0]}).tokens == [5]
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": [[[1.0]]]})


def test_numbers_within_free_objects_stay_as_they_are():
    body = {"model": "a", "options": {"seed": 3.0}, "messages": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 12.0}}}]}]}  # fmt: skip
    found = OllamaChatRequest.model_validate(body)
    assert found.options.seed == 3
    assert '"x": 12.0' in str(ollama_messages(found.messages))


OF_OTHERS = {
    "reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}], "provider_specific_fields": {},
    "audio": None, "annotations": [{"type": "url_citation"}], "refusal": None, "function_call": None, "timestamp": 17, "id": "m",
    "images": [], "thinking_blocks": [{}], "token_ids": None, "metadata": {}, "cache_control": {"type": "ephemeral"}, "parts": [],
}  # fmt: skip
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "thought_signature": "x"}, "index": 0,
        "extra_content": {"google": {}}, "provider_specific_fields": None}  # fmt: skip


def chat_messages(*messages):
    return template_messages(ChatRequest.model_validate({"messages": [*messages, USER]}).messages)[:-1]


def test_messages_of_other_servers_are_taken():
    (found,) = chat_messages({"role": "assistant", "content": None, "tool_calls": [CALL], **OF_OTHERS})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert found["tool_calls"] == [call]
    assert found["reasoning_content"] == "hm"
    assert set(found) == {"role", "content", "tool_calls", "reasoning_content"}
    (found,) = chat_messages(
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": None}}]}
    )
    assert found["tool_calls"] == [call]


@pytest.mark.parametrize(
    "change, content, reasoning",
    [
        ({"reasoning_content": "a", "reasoning": "b", "content": "c"}, "c", "a"),
        ({"reasoning": {"effort": "high"}, "content": "c"}, "c", None),
        ({"content": [{"type": "text", "text": "a", "cache_control": {}}, {"type": "refusal", "refusal": "no"}]}, "ano", None),
        ({"content": None, "refusal": "no"}, "no", None),
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "h"}]}, {"type": "text", "text": "c"}]}, "c",
         "h"),
        ({"content": [{"type": "thinking", "thinking": "h", "signature": "x"}]}, "", "h"),
        ({"content": [{"type": "redacted_thinking", "data": "x"}, {"type": "reasoning", "text": "h"}]}, "", "h"),
    ],
)  # fmt: skip
def test_what_a_message_says_reaches_the_template(change, content, reasoning):
    (found,) = chat_messages({"role": "assistant", **change})
    assert (found["content"] or "", found.get("reasoning_content")) == (content, reasoning)


def test_items_and_ollamas_messages_of_other_servers_are_taken():
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "status": None, "content": None,
         "format": "x"},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed",
         "namespace": None, "created_by": "me"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1", "cache_control": {}}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {}}], "timestamp": 1},
    ]  # fmt: skip
    found = messages_of(ResponsesRequest.model_validate({"input": items}).input)
    assert [message["role"] for message in found] == ["assistant", "tool", "user"]
    call = {"id": "c", "function": {"name": "f", "arguments": {}, "index": 0}, "extra_content": {}}
    message = {"role": "assistant", "content": "", "tool_calls": [call], "done_reason": "stop", "created_at": "now"}
    assert ollama_messages(OllamaChatRequest.model_validate({"model": "a", "messages": [message]}).messages)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize("kind", [ChatRequest, OllamaChatRequest])
def test_a_tool_may_have_more_fields_but_none_that_is_misspelled(kind):
    body = {**LEAST[kind], "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}, "defer_loading": True}]}
    assert kind.model_validate(body).tools[0].model_dump(exclude_none=True) == TOOL
    body["tools"] = [{**TOOL, "function": {**TOOL["function"], "cache_control": {}, "return": {"type": "string"}}}]
    body["tools"][0]["function"] |= {"type": "function", "title": "F", "id": "f", "outputSchema": {}, "annotations": {}}
    assert kind.model_validate(body).tools[0].model_dump(exclude_none=True) == TOOL
    body["tools"] = [{**TOOL, "function": {"name": "f", "paramters": {}}}]
    with pytest.raises(ValidationError, match="paramters"):
        kind.model_validate(body)


@pytest.mark.parametrize("kind", LEAST)
def test_unknown_parameters_of_a_request_are_refused(kind):
    if kind in (InfillRequest, MessagesRequest):  # their clients send many that are for other servers
        assert kind.model_validate({**LEAST[kind], "colour": 1})
        return
    with pytest.raises(ValidationError, match="colour"):
        kind.model_validate({**LEAST[kind], "colour": 1})
    assert kind.model_validate({**LEAST[kind], "colour": None})

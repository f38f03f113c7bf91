"""Every field of every API changes the request that a model sees, or the answer; or it is refused, or ``docs/server.md`` lists it
as accepted without effect."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path

import httpx
import openvino_genai as genai
import pytest
from pydantic import BaseModel
from support.encoders.encoder_directories import a_directory, a_scorer
from support.server.served import serving

from staticllm import demo_model_path
from staticllm.server.app import POSTS
from staticllm.server.models.served import demo_spec, model_spec
from staticllm.server.responses.fields import ResponsesRequest
from staticllm.testing import fake_pipeline

pytest.importorskip("llguidance")

DOCS = Path(__file__).parents[3] / "docs" / "server.md"
KINDS = {**{path: kind for path, kind, _ in POSTS}, "/v1/responses": ResponsesRequest}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    '{# <tool_call>{"name": "f", "arguments": {}}</tool_call> <think> </think> #}{{ enable_thinking }}'
)
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SCHEMA = {"type": "object", "properties": {"b": {"type": "boolean"}}}
USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", **FUNCTION}
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
BODIES = {
    "/v1/chat/completions": {"model": "fake", "messages": [USER], "temperature": 1, "seed": 1, "max_tokens": 8},
    "/v1/completions": {"model": "fake", "prompt": "Hello", "temperature": 1, "seed": 1, "max_tokens": 8},
    "/v1/responses": {"model": "fake", "input": [{"role": "user", "content": "Hello"}], "temperature": 1, "seed": 1,
                      "max_output_tokens": 8},
    "/api/chat": {"model": "fake", "messages": [USER], "stream": False, "options": {"temperature": 1, "seed": 1}},
    "/api/generate": {"model": "fake", "prompt": "Hello", "stream": False, "options": {"temperature": 1, "seed": 1}},
    "/v1/embeddings": {"model": "tiny", "input": "a cat"},
    "/v1/rerank": {"model": "ranks", "query": "a", "documents": ["a b", {"text": "c"}]},
    "/tokenize": {"model": "fake", "content": "a <|im_end|>"},
    "/detokenize": {"model": "fake", "tokens": [300, 301]},
    "/api/embed": {"model": "tiny", "input": "a cat"},
    "/api/embeddings": {"model": "tiny", "prompt": "a cat"},
    "/api/show": {"model": "fake"},
}  # fmt: skip
SAME_PATHS = {"/v2/rerank": "/v1/rerank", "/rerank": "/v1/rerank"}
SAMPLING = {
    "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 1.5, "repeat_penalty": 1.5,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 2, "typical_p": 0.5, "xtc_probability": 0.5,
    "xtc_threshold": 0.3, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2, "dry_multiplier": 0.5, "dry_base": 2.0,
    "dry_allowed_length": 3, "dry_penalty_last_n": 5, "finish_grammar": 0, "stop": "e",
}  # fmt: skip
DRY = {"dry_multiplier": 1.0}
CONTEXT = {
    "xtc_threshold": {"xtc_probability": 0.5}, "mirostat_tau": {"mirostat": 2}, "mirostat_eta": {"mirostat": 2},
    "dry_base": DRY, "dry_allowed_length": DRY, "dry_penalty_last_n": DRY, "dry_sequence_breakers": DRY,
}  # fmt: skip
ANY = {
    "user": "me", "metadata": {"a": "b"}, "store": True, "safety_identifier": "me", "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "verbosity": "low", "cache_prompt": False, "ctx_len": 64, "service_tier": "flex",
    "model": "other",
}  # fmt: skip
OPENAI = {
    **SAMPLING, **ANY, "n": 2, "logit_bias": {"5": 3}, "stream": True, "stream_options": [{"include_usage": True}],
    "stream_options.include_usage": (True, {"stream": True}), "stream_options.include_obfuscation": (True, {"stream": True}),
    "dry_sequence_breakers": ["x"], "num_beams": 2, "min_tokens": 3, "ignore_eos": True,
    "return_progress": (True, {"stream": True}), "priority": -1,
}  # fmt: skip
FORMAT = {"type": "object", "properties": {"c": {"type": "null"}}}
TOOLS = {
    "tools": [TOOL], "tools.type": "web_search", "tools.function": {"name": "g"}, "tools.function.name": "g",
    "tools.function.description": "It does.", "tools.function.parameters": SCHEMA, "tools.function.strict": True,
}  # fmt: skip
MESSAGE = {
    "messages": [USER, USER], "messages.role": "system", "messages.content": "x", "messages.content.type": "image_url",
    "messages.content.text": "x", "messages.content.refusal": ("never", {"messages.content.type": "refusal"}),
    "messages.content.thinking": ("hm", {"messages.content.type": "thinking", "messages.role": "assistant"}),
    "messages.content.reasoning": (
        "hm", {"messages.content.type": "reasoning", "messages.content.thinking": None, "messages.role": "assistant"}
    ),
    "messages.name": "Ada", "messages.tool_calls": [CALL, CALL],
    "messages.tool_calls.id": "y", "messages.tool_calls.type": "custom", "messages.tool_calls.function": {"name": "g"},
    "messages.tool_calls.function.name": "g", "messages.tool_calls.function.arguments": '{"a": 1}',
    "messages.tool_call_id": "x", "messages.reasoning_content": "hm", "messages.reasoning": "hm",
    "messages.refusal": ("no", {"messages.content": None}),
    "messages.audio": {"id": "a"}, "messages.function_call": {"name": "f"},
}  # fmt: skip
OPTIONS = {f"options.{name}": value for name, value in SAMPLING.items()} | {
    "options": {"top_k": 3}, "options.num_predict": 3, "options.num_ctx": 64, "options.num_keep": 5, "options.num_batch": 5,
    "options.num_gpu": 5, "options.num_gqa": 5, "options.num_thread": 5, "options.main_gpu": 5, "options.repeat_last_n": 5,
    "options.tfs_z": 0.5, "options.penalize_newline": True, "options.numa": True, "options.low_vram": True,
    "options.f16_kv": True, "options.logits_all": True, "options.vocab_only": True, "options.use_mmap": True,
    "options.use_mlock": True, "options.embedding_only": True,
}  # fmt: skip
OLLAMA = {
    **OPTIONS, "model": "other", "keep_alive": "7m", "truncate": False, "stream": True, "format": "json", "think": False,
    "logprobs": True, "top_logprobs": 3, "shift": False,
}  # fmt: skip
LONG = "cat " * 600
VALUES = {
    "/v1/chat/completions": {
        **OPENAI, **MESSAGE, **TOOLS, "max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 3, "logprobs": True,
        "top_logprobs": 3, "response_format": {"type": "json_object"},
        "response_format.type": ("json_object", {"response_format": {"type": "text"}}),
        "response_format.json_schema": {"schema": FORMAT}, "response_format.json_schema.name": "other",
        "response_format.json_schema.description": "other", "response_format.json_schema.schema": FORMAT,
        "response_format.json_schema.strict": False, "tool_choice": ("required", {"tools": [TOOL]}),
        "parallel_tool_calls": (False, {"tools": [TOOL]}), "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False}, "modalities": ["audio"], "functions": [FUNCTION],
        "function_call": {"name": "f"},
    },
    "/v1/completions": {
        **OPENAI, "prompt": "x", "max_tokens": 3, "echo": True, "logprobs": 0, "best_of": 2, "suffix": "x",
    },
    "/v1/responses": {
        **SAMPLING, **ANY, "store": False, "input": "x", "input.type": "reasoning", "input.id": "x",
        "input.status": "incomplete",
        "input.phase": "final_answer", "input.role": "system", "input.content": "x", "input.content.type": "input_image",
        "input.content.text": "x", "input.content.refusal": ("no", {"input.content.type": "refusal"}), "input.call_id": "y",
        "input.name": "g", "input.arguments": '{"a": 1}', "input.output": "y", "input.output.type": "input_image",
        "input.output.text": "y", "input.output.refusal": ("no", {"input.output.type": "refusal"}),
        "input.summary": [{"type": "summary_text", "text": "x"}],
        "input.encrypted_content": "x", "instructions": "x", "previous_response_id": "resp_1", "stream": True,
        "stream_options": {"include_obfuscation": True}, "stream_options.include_obfuscation": (True, {"stream": True}),
        "background": True, "max_tool_calls": 3, "max_output_tokens": 3, "top_logprobs": 3,
        "text": {"format": {"type": "json_object"}},
        "text.format": {"type": "json_object"}, "text.format.type": "json_object", "text.format.name": "other",
        "text.format.description": "other", "text.format.schema": FORMAT, "text.format.strict": False, "text.verbosity": "low",
        "reasoning": {"effort": "low"}, "reasoning.effort": "low", "reasoning.summary": "auto",
        "reasoning.generate_summary": "auto",
        "tools": [FLAT], "tools.type": "web_search", "tools.name": "g", "tools.description": "It does.",
        "tools.parameters": SCHEMA, "tools.strict": True, "tool_choice": ("required", {"tools": [FLAT]}),
        "parallel_tool_calls": (False, {"tools": [FLAT]}), "truncation": "auto",
        "include": ["message.output_text.logprobs"], "chat_template_kwargs": {"enable_thinking": False}, "priority": -1,
    },
    "/api/chat": {
        **OLLAMA, **TOOLS, **{name: value for name, value in MESSAGE.items() if "content." not in name},
        "messages.thinking": "hm",
        "messages.images": ["aGk="], "messages.tool_name": "f", "messages.tool_calls.function.arguments": {"a": 1},
    },
    "/api/generate": {
        **OLLAMA, "prompt": "x", "system": "x", "raw": True, "suffix": "x", "template": "x", "images": ["aGk="], "context": [5],
    },
    "/v1/embeddings": {
        **ANY, "service_tier": "default", "input": "x", "encoding_format": "base64", "dimensions": 3, "input_type": "query",
    },
    "/v1/rerank": {
        **ANY, "query": "x", "documents": ["c"], "documents.text": "x y z", "top_n": 1, "return_documents": True,
    },
    "/tokenize": {
        "model": "other", "content": "x", "prompt": "x", "messages": [USER], "add_special": True, "parse_special": False,
        "with_pieces": True, **{name: "x" for name in MESSAGE if name != "messages"},
    },
    "/detokenize": {"model": "other", "tokens": [302]},
    "/api/embed": {
        **OPTIONS, "model": "other", "keep_alive": "7m", "truncate": (False, {"input": LONG}), "input": "x", "dimensions": 3,
    },
    "/api/embeddings": {**OPTIONS, "model": "other", "keep_alive": "7m", "truncate": (False, {"prompt": LONG}), "prompt": "x"},
    "/api/show": {
        "model": "other", "name": "other", "verbose": True, "system": "x", "template": "x", "options": {"num_ctx": 5},
    },
}  # fmt: skip
"""A value of each field, or several in a list of lists; a tuple has the fields that it needs beside it."""
VOLATILE = re.compile(
    r"id|created.*|completed_at|.*_duration|timings|.*cached_tokens.*|modified_at|total_tokens_details"
)


def models_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from models_in(part)


def fields_of(kind, before=""):
    """Return the fields of a body and of the objects in it, with dots between their names."""
    found = {}
    for name, field in kind.model_fields.items():
        path = f"{before}{field.alias or name}"
        found[path] = field
        for inner in models_in(field.annotation):
            found |= fields_of(inner, path + ".")
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    tokenizer = genai.Tokenizer(str(demo_model_path()))
    tokenizer.chat_template = TEMPLATE

    def load(device, properties, on_progress):
        return fake_pipeline("Hello there, fox. <|im_end|>", tokenizer=tokenizer)

    tiny = a_directory(tmp_path_factory.mktemp("tiny"))
    ranks = a_scorer(tmp_path_factory.mktemp("ranks") / "model")
    specs = [
        demo_spec(),
        model_spec(f"fake={demo_model_path()}"),
        model_spec(f"tiny={tiny}"),
        model_spec(f"ranks={ranks}"),
    ]
    with serving(specs, {"fake": load}) as served:
        yield served


class Watch:
    """Sends requests, and says what became of each: what the model saw of it, and the answer."""

    def __init__(self, served, monkeypatch):
        self._served = served
        self._seen = []
        self._client = httpx.Client(base_url=served.url, timeout=60)
        for name, path in (("fake", "/v1/chat/completions"), ("tiny", "/v1/embeddings"), ("ranks", "/v1/rerank")):
            self.send(path, BODIES[path])  # it is loaded
            pipeline = served.pipeline(name)
            for method in ("submit", "submit_texts"):
                if hasattr(pipeline, method):
                    monkeypatch.setattr(pipeline, method, self._watched(getattr(pipeline, method)))

    def _watched(self, submit):
        def watched(*inputs, **options):
            self._seen.append((repr(inputs), sorted(options.items(), key=lambda item: item[0])))
            return submit(*inputs, **options)

        return watched

    def send(self, path, body):
        """Return what is seen of a request; None if it is refused."""
        self._seen.clear()
        found = self._client.post(path, json=body)
        assert found.status_code in (200, 400, 404), (path, body, found.text)
        if found.status_code != 200:
            return None
        models = self._served.state.hub.models
        state = [(name, model.keep_alive) for name, model in models.items()]
        for model in models.values():
            model.keep_for(None)
        return [*self._seen], self._shown(path, found), state

    def _shown(self, path, found):
        if not found.headers["content-type"].startswith("application/json"):
            return sorted({name for line in found.text.splitlines() for name in re.findall(r'"(\w+)":', line)})
        body = found.json()
        if path == "/v1/responses":
            is_stored = self._client.get(f"/v1/responses/{body['id']}").status_code
            return steady({name: body[name] for name in ("output", "usage", "status")}), is_stored
        return steady(body)


def steady(value):
    if isinstance(value, dict):
        return {name: steady(each) for name, each in value.items() if not VOLATILE.fullmatch(name)}
    if isinstance(value, list):
        return [steady(each) for each in value]
    return round(value, 2) if isinstance(value, float) else value


@pytest.fixture(scope="module")
def watch(served):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Watch(served, monkeypatch)


BASES = {
    "messages.content": [{"type": "text", "text": "Hello", "refusal": "no", "thinking": "a", "reasoning": "a"}],
    "response_format": NAMED,
    "text.format": {"type": "json_schema", "name": "n", "schema": SCHEMA},
    "stream_options": {},
}


def with_value(body, path, value):
    """Return a body with the value of a field; what it lies in is there already, or is made."""
    body = json.loads(json.dumps(body))
    names = path.split(".")
    at = body
    for place, name in enumerate(names[:-1]):
        before = ".".join(names[: place + 1])
        if name not in at or not isinstance(at[name], (dict, list)):
            at[name] = json.loads(json.dumps(BASES.get(before, {})))
        at = at[name][0] if isinstance(at[name], list) else at[name]
    at[names[-1]] = value
    return body


CALLED = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "y", "tool_call_id": "x"},
]
ITEM = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "x"}
PART = {"type": "input_text", "text": "z", "refusal": "a"}
CHANGES = (
    ("/api/show", "name", {"model": None, "name": "fake"}),
    ("/v1/responses", "tools.", {"tools": [FLAT]}),
    ("/v1/responses", "input.output", {"input": [{**RESULT, "output": [PART]}, ITEM, USER]}),
    ("/v1/responses", "input.content.", {"input": [{"role": "user", "content": [PART]}]}),
    ("/v1/responses", "text.format.", {"text": {"format": BASES["text.format"]}}),
    *(
        ("/v1/responses", f"input.{name}", {"input": [ITEM, {**RESULT, "output": "z"}, USER]})
        for name in ("call_id", "name", "arguments")
    ),
    ("", "tools.", {"tools": [TOOL]}),
    ("", "response_format.", {"response_format": NAMED}),
    ("/v1/chat/completions", "messages.tool_calls", {"messages": [*CALLED, USER]}),
    (
        "/api/chat",
        "messages.tool_calls",
        {"messages": [{**CALLED[0], "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, CALLED[1], USER]},
    ),
    ("", "messages.content.", {"messages": [{"role": "user", "content": BASES["messages.content"]}, USER]}),
    ("", "messages.", {"messages": [USER, USER]}),
    ("", "documents.text", {"documents": [{"text": "c"}, "a b"]}),
)
"""To what the values of fields are compared: the beginnings of a path and of a field, and what the body has in their case."""


def base_of(path, field):
    """Return the body to which a value of a field is compared."""
    found = (change for start, name, change in CHANGES if path.startswith(start) and field.startswith(name))
    return {**BODIES[path], **next(found, {})}


def without_effect():
    """Return the fields that the documentation lists as accepted without effect: (start of the path, field)."""
    section = DOCS.read_text().split("### Fields without effect")[1].split("\n## ")[0]
    found = set()
    for row in re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE):
        for path in re.findall(r"`(/[^`]+)`", row[0]):
            found |= {(path, name) for name in re.findall(r"`([^`]+)`", row[1])}
    return found


@pytest.mark.parametrize("path", VALUES)
def test_each_field_changes_something_or_is_refused_or_is_documented(watch, path):
    documented = {name for start, name in without_effect() if path == start}
    fields = fields_of(KINDS[path])
    if path == "/tokenize":
        fields = {name: field for name, field in fields.items() if not name.startswith("messages.")}
    missing = [name for name in fields if name not in VALUES[path]]
    assert not missing, "give each field a value here"
    ignored = []
    for field in fields:
        value = VALUES[path][field]
        value, context = value if isinstance(value, tuple) else (value, {})
        base = base_of(path, field)
        context = {**CONTEXT.get(field.split(".")[-1], {}), **context}
        prefix = "options." if field.startswith("options.") else ""
        for name, each in context.items():
            base = with_value(base, (prefix if "." not in name else "") + name, each)
        before = watch.send(path, base)
        again = watch.send(path, base)
        assert before is not None, (field, base)
        assert before == again, (field, base)
        if watch.send(path, with_value(base, field, value)) == before:
            ignored.append(field)
    unsaid = [name for name in ignored if not {name, name.split(".")[0]} & documented]
    assert not unsaid, f"accepted without a word: {' '.join(unsaid)}"
    wrong = sorted(documented - set(ignored))
    assert not wrong, f"documented as without effect: {' '.join(wrong)}"


def test_the_paths_that_are_not_listed_are_others_of_those_that_are():
    elsewhere = {
        "/infill",
        "/v1/decisions",
        "/v1/messages",
        "/v1/messages/count_tokens",
    }  # files of their own try these
    assert {*VALUES, *SAME_PATHS} == {*KINDS} - elsewhere
    assert all(KINDS[path] is KINDS[other] for path, other in SAME_PATHS.items())

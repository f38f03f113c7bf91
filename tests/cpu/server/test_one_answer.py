"""A streamed answer and a whole one are the same answer: random requests to all APIs, assembled as clients do it."""

from __future__ import annotations

import json
import random

import httpx
import openvino_genai as genai
import pytest
from support.server.served import serving

from staticllm import demo_model_path
from staticllm.testing import fake_pipeline

pytest.importorskip("llguidance")

NUM_REQUESTS = 60
"""Random requests for each path."""
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>'
BROKEN = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", oh no</tool_call>'
REPLIES = (
    "a b c d, and so on to the end of it",
    "edded dd ab cd ab",
    "naïve café 🦊🐻 東京 – done",
    "",
    "x",
    "<think>first this, then 🦊</think>\n\nso that",
    f"See: {CALL}",
    CALL + "\n" + CALL.replace("Rome", "Oslo"),
    f"<think>hm</think>{CALL}{CALL}\n{CALL} bye",
    BROKEN,
    f"{CALL}{BROKEN} and {CALL}",
    '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}',
    '{"a": 1}',
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    '{# <tool_call>{"name": "f", "arguments": {}}</tool_call> <think> </think> enable_thinking #}'
)
TOO_LONG = "word " * 3000


def tokenizer():
    made = genai.Tokenizer(str(demo_model_path()))
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def client():
    """A client of a server with two models: ``fake`` answers what stands behind ``ANSWER:``, ``demo`` is the embedded one."""

    def fake(device, properties, on_progress):
        return fake_pipeline(lambda prompt: prompt.rsplit("ANSWER:", 1)[-1], tokenizer=tokenizer())

    from staticllm.server.models.served import demo_spec, model_spec

    specs = [demo_spec(), model_spec(f"fake={demo_model_path()}")]
    with serving(specs, {"fake": fake}) as served, httpx.Client(base_url=served.url, timeout=300) as client:
        yield client


class Draw:
    """Draws the fields of a request."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self.choice = self._random.choice
        self.model = self.choice(["fake", "fake", "demo"])
        self.reply = self.choice(REPLIES)

    def may(self, probability=0.5):
        return self._random.random() < probability

    def prompt(self):
        if self.may(0.03):
            return TOO_LONG
        return (
            f"Tell me. ANSWER:{self.choice(REPLIES)}"
            if self.model == "fake"
            else self.choice(["a b c d", "x", "🦊 fox"])
        )

    def fields(self, **choices):
        return {name: self.choice(values) for name, values in choices.items() if self.may()}

    def stop(self):
        text = self.choice(REPLIES)
        start = self._random.randrange(len(text) + 1)
        return self.choice([["zzz"], "e", [" "], ["a", "the"], [text[start : start + self.choice([1, 2, 5])] or "b"]])

    def sampling(self):
        found = self.fields(temperature=[0, 1.5], top_k=[3], presence_penalty=[0.5])
        found["seed"] = self._random.randrange(1, 1000)
        return {**found, **({"stop": self.stop()} if self.may(0.4) else {})}

    def tools(self, wrap):
        if not self.may(0.6):
            return {}
        found = {"tools": [wrap(FUNCTION), wrap({"name": "now", "parameters": {}})]}
        return {**found, **self.fields(parallel_tool_calls=[True, False])}


def wrapped(function):
    return {"type": "function", "function": function}


def chat_body(draw):
    body = {"model": draw.model, "messages": [{"role": "user", "content": draw.prompt()}], **draw.sampling()}
    body |= draw.fields(n=[1, 2, 3], logprobs=[True, False], max_tokens=[0, 1, 2, 7, 40, 200], return_progress=[True])
    body.setdefault("max_tokens", 60)
    body |= draw.tools(wrapped)
    named = wrapped({"name": "weather"})
    if draw.may(0.3):
        body["tool_choice"] = draw.choice(["none", "auto", "required", named])
    if draw.may(0.2):
        format = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        body["response_format"] = draw.choice([{"type": "text"}, {"type": "json_object"}, format])
    return body


def completion_body(draw):
    count = draw.choice([1, 1, 2, 3])
    prompts = [draw.prompt() for _ in range(count)]
    if draw.may(0.2):
        prompts = [[5, 6, 7 + index] for index in range(count)]
        if draw.may(0.2):
            prompts[-1] = [5, 2**30]
    if draw.may(0.1) and isinstance(prompts[0], str):
        prompts[-1] = ""
    body = {"model": draw.model, "prompt": prompts[0] if count == 1 else prompts, **draw.sampling()}
    body |= draw.fields(n=[1, 2, 3], max_tokens=[0, 1, 2, 7, 40], echo=[True, True, False])
    return {**body, **({"logprobs": 0} if draw.may(0.3) else {}), **draw.fields(return_progress=[True])}


def responses_body(draw):
    body = {"model": draw.model, "input": draw.prompt(), "store": False, **draw.sampling()}
    body |= {"max_output_tokens": draw.choice([1, 2, 7, 40, 200])}
    body |= draw.tools(lambda function: {"type": "function", **function})
    if draw.may(0.3):
        body["tool_choice"] = draw.choice(["none", "auto", "required", {"type": "function", "name": "weather"}])
    if draw.may(0.2):
        format = {"type": "json_schema", "name": "a", "schema": SCHEMA}
        body["text"] = {"format": draw.choice([{"type": "text"}, {"type": "json_object"}, format])}
    if draw.may(0.2):
        body["include"] = ["message.output_text.logprobs"]
    return {**body, **draw.fields(truncation=["auto", "disabled"])}


def ollama_options(draw):
    sampling = draw.sampling()
    return {"num_predict": draw.choice([1, 2, 7, 40, 200]), **sampling}


def ollama_body(draw):
    body = {"model": draw.model, "options": ollama_options(draw)}
    body |= draw.fields(logprobs=[True, False], truncate=[True, False], shift=[True, False])
    if draw.may(0.2):
        body["format"] = draw.choice(["json", SCHEMA])
    return body


def ollama_chat_body(draw):
    body = {**ollama_body(draw), "messages": [{"role": "user", "content": draw.prompt()}]}
    if draw.may(0.6):
        body["tools"] = [wrapped(FUNCTION), wrapped({"name": "now", "parameters": {}})]
    return {**body, **draw.fields(think=[True, False])}


def ollama_generate_body(draw):
    return {**ollama_body(draw), "prompt": draw.prompt(), **draw.fields(raw=[True, False], think=[True, False])}


def events_of(text):
    """Return the JSON of the events of a stream, and whether it ends with ``[DONE]``."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    has_end = bool(lines) and lines[-1] == "[DONE]"
    return [json.loads(line) for line in (lines[:-1] if has_end else lines)], has_end


def rounded(value):
    """Return a JSON value with numbers that do not depend on which requests share a call."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def check_all(check):
    """Check random requests by their numbers; ``check`` returns whether there was an answer. Name all that are wrong."""
    wrong = []
    num_answers = 0
    for seed in range(NUM_REQUESTS):
        try:
            num_answers += check(seed)
        except AssertionError as error:
            wrong.append(f"{seed}: {str(error)[:600]}")
    assert not wrong, f"{len(wrong)} of {NUM_REQUESTS} differ:\n" + "\n".join(wrong)
    assert num_answers > NUM_REQUESTS / 2


def is_refused(whole, streamed, about):
    """Return whether a request was refused; both answers must say the same then."""
    assert streamed.status_code == whole.status_code, (*about, whole.text[:200], streamed.text[:200])
    if whole.status_code == 200:
        return False
    assert whole.status_code == 400, (*about, whole.text)
    assert streamed.json() == whole.json(), about
    return True


def failed(chunks):
    return next(({"error": chunk["error"]} for chunk in chunks if "error" in chunk), None)


def counts_of(usage):
    """Return the numbers of tokens without that of cached ones, which the first of two requests fills."""
    return {name: value for name, value in usage.items() if isinstance(value, int)}


class OpenAIStream:
    """Assembles chunks, as OpenAI's clients do."""

    def __init__(self, text):
        chunks, self.has_end = events_of(text)
        self.error = failed(chunks)
        self.usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        self.has_last_usage = bool(chunks) and bool(chunks[-1].get("usage")) and not chunks[-1]["choices"]
        self.choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
        self.heads = {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks if "error" not in chunk}


def of_chat(text):
    stream = OpenAIStream(text)
    found = {}
    for choice in stream.choices:
        known = found.setdefault(
            choice["index"], {"content": "", "reasoning": "", "calls": {}, "logprobs": [], "end": None}
        )
        assert known["end"] is None, "a chunk after the end"
        delta = choice["delta"]
        known["content"] += delta.get("content") or ""
        known["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            entry = known["calls"].setdefault(call["index"], {"name": call["function"].get("name"), "arguments": ""})
            entry["arguments"] += call["function"]["arguments"]
        known["logprobs"] += (choice["logprobs"] or {}).get("content") or []
        known["end"] = choice["finish_reason"]
    for known in found.values():
        assert [*known["calls"]] == list(range(len(known["calls"]))), "calls are numbered without gaps"
        known["calls"] = [*known["calls"].values()]
    return stream, found


def of_whole_chat(body):
    found = {}
    for choice in body["choices"]:
        message = choice["message"]
        found[choice["index"]] = {
            "content": message["content"] or "",
            "reasoning": message.get("reasoning_content") or "",
            "calls": [call["function"] for call in message.get("tool_calls") or ()],
            "logprobs": (choice["logprobs"] or {}).get("content") or [],
            "end": choice["finish_reason"],
        }
    return found


def of_completion(text):
    stream = OpenAIStream(text)
    found = {}
    for choice in stream.choices:
        known = found.setdefault(choice["index"], {"text": "", "logprobs": {}, "end": None})
        assert known["end"] is None, "a chunk after the end"
        known["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            known["logprobs"].setdefault(name, []).extend(values or [])
        known["end"] = choice["finish_reason"]
    return stream, found


def of_whole_completion(body):
    found = {}
    for choice in body["choices"]:
        logprobs = {name: values or [] for name, values in (choice["logprobs"] or {}).items()}
        if not logprobs.get("tokens"):
            logprobs = {}
        found[choice["index"]] = {"text": choice["text"], "logprobs": logprobs, "end": choice["finish_reason"]}
    return found


CHECKS = {
    "/v1/chat/completions": (chat_body, of_chat, of_whole_chat),
    "/api/v0/chat/completions": (chat_body, of_chat, of_whole_chat),
    "/v1/completions": (completion_body, of_completion, of_whole_completion),
    "/api/v0/completions": (completion_body, of_completion, of_whole_completion),
}


@pytest.mark.parametrize("path", CHECKS)
def test_chunks_of_openai_make_the_whole_answer(client, path):
    body_of, of_stream, of_whole = CHECKS[path]

    def check(seed):
        draw = Draw(f"{path} {seed}")
        body = body_of(draw)
        has_usage = draw.may()
        whole = client.post(path, json=body)
        options = {"stream_options": {"include_usage": True}} if has_usage else {}
        streamed = client.post(path, json={**body, **options, "stream": True})
        if is_refused(whole, streamed, [body]):
            return False
        stream, found = of_stream(streamed.text)
        assert stream.error is None, (stream.error, body)
        assert stream.has_end, body
        assert len(stream.heads) == 1, body
        wanted = of_whole(whole.json())
        assert rounded(found) == rounded(wanted), (found, wanted, body)
        assert (len(stream.usages), stream.has_last_usage) == (has_usage, has_usage), (stream.usages, body)
        if has_usage:
            assert counts_of(stream.usages[0]) == counts_of(whole.json()["usage"]), body
        return True

    check_all(check)


def without_ids(item):
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def of_events(events):
    """Return the items that the pieces of a stream make, which are not broken off."""
    found = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            found[event["output_index"]] = {"item": event["item"], "text": "", "logprobs": []}
        elif event["type"].endswith(".delta"):
            found[event["output_index"]]["text"] += event["delta"]
            found[event["output_index"]]["logprobs"] += event.get("logprobs", [])
        elif event["type"] == "response.output_item.done":
            entry = found[event["output_index"]]
            entry["item"] = event["item"]
            inner = event["item"]
            text = inner["arguments"] if inner["type"] == "function_call" else inner["content"][0]["text"]
            assert text == entry["text"]
            if inner["type"] == "message":
                assert inner["content"][0]["logprobs"] == entry["logprobs"]
    is_kept = {index: not (each["item"]["type"] == "function_call" and each["item"]["status"] == "incomplete")
               for index, each in found.items()}  # fmt: skip
    return [without_ids(found[index]["item"]) for index in sorted(found) if is_kept[index]]


def test_events_of_responses_make_the_whole_answer(client):
    def check(seed):
        body = responses_body(Draw(f"responses {seed}"))
        whole = client.post("/v1/responses", json=body)
        streamed = client.post("/v1/responses", json={**body, "stream": True})
        if is_refused(whole, streamed, [body]):
            return False
        events, _ = events_of(streamed.text)
        last = events[-1]
        assert last["type"] in ("response.completed", "response.incomplete"), (last, body)
        same = ("status", "incomplete_details", "tool_choice", "parallel_tool_calls", "text", "tools")
        assert {name: last["response"][name] for name in same} == {name: whole.json()[name] for name in same}, body
        wanted = rounded([without_ids(item) for item in whole.json()["output"]])
        found = rounded([without_ids(item) for item in last["response"]["output"]])
        assert found == wanted, (found, wanted, body)
        assert rounded(of_events(events)) == wanted, (of_events(events), wanted, body)
        assert counts_of(last["response"]["usage"]) == counts_of(whole.json()["usage"]), body
        return True

    check_all(check)


def of_object(body):
    """Return what an object of Ollama's API says of its answer."""
    message = body.get("message") or {"content": body["response"], "thinking": body.get("thinking")}
    return {
        "content": message["content"],
        "thinking": message.get("thinking") or "",
        "calls": [call["function"] for call in message.get("tool_calls") or ()],
        "logprobs": body.get("logprobs") or [],
    }


def of_lines(objects):
    found = {"content": "", "thinking": "", "calls": [], "logprobs": []}
    for each in objects:
        for name, value in of_object(each).items():
            found[name] += value
    return found


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_lines_of_ollama_make_the_whole_answer(client, path):
    def check(seed):
        body = (ollama_chat_body if path == "/api/chat" else ollama_generate_body)(Draw(f"{path} {seed}"))
        whole = client.post(path, json={**body, "stream": False})
        streamed = client.post(path, json=body)
        if is_refused(whole, streamed, [body]):
            return False
        objects = [json.loads(line) for line in streamed.text.splitlines()]
        assert not any("error" in each for each in objects), (objects[-1], body)
        assert [each["done"] for each in objects] == [False] * (len(objects) - 1) + [True], body
        found = rounded(of_lines(objects))
        wanted = rounded(of_object(whole.json()))
        assert found == wanted, (found, wanted, body)
        same = ("done_reason", "prompt_eval_count", "eval_count", "model")
        assert {name: objects[-1][name] for name in same} == {name: whole.json()[name] for name in same}, body
        return True

    check_all(check)

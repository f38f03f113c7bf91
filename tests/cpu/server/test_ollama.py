"""Tests Ollama's API without a client: chats, texts, models, loading and unloading, and errors in its form."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
from support.attach.daemons import wait_for
from support.encoders.encoder_directories import TEXTS, a_directory
from support.models.echo_model import CALL, asking, load_echo
from support.server.served import serving

from staticllm.pipelines.generation.options.table import UNLIMITED
from staticllm.pipelines.text.input_processor import ROOM
from staticllm.server.models.served import model_spec
from staticllm.server.ollama.fields import seconds_of

pytestmark = pytest.mark.usefixtures("shared_programs")

QUESTION = "What is an NPU?"
MESSAGES = [{"role": "user", "content": QUESTION}]
LETTER = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"]}


@pytest.fixture(scope="module")
def post(served):
    def post(path, **body):
        return httpx.post(f"{served.url}/api/{path}", json={"model": "demo", **body}, timeout=60)

    return post


@pytest.fixture(scope="module")
def answer(served):
    """The answer of the pipeline itself."""
    return served.pipeline().generate(MESSAGES, max_new_tokens=40)


def lines_of(response):
    assert response.headers["content-type"] == "application/x-ndjson"
    *lines, rest = response.text.split("\n")
    assert rest == ""
    return [json.loads(line) for line in lines]


def test_a_chat_streams_by_default_and_ends_with_a_reason_and_durations(post, answer):
    found = lines_of(post("chat", messages=MESSAGES, options={"num_predict": 40}))
    *pieces, last = found
    assert "".join(piece["message"]["content"] for piece in pieces) == answer.texts[0]
    assert len(pieces) > 5
    assert {piece["done"] for piece in pieces} == {False}
    assert {piece["message"]["role"] for piece in found} == {"assistant"}
    assert {piece["model"] for piece in found} == {"demo"}
    assert last["done"] is True
    assert last["done_reason"] == str(answer.finish_reasons[0].value)
    assert last["message"]["content"] == ""
    assert last["eval_count"] == len(answer.tokens[0])
    assert last["prompt_eval_count"] == answer.perf_metrics.get_num_input_tokens()
    assert all(isinstance(last[name], int) for name in ("load_duration", "prompt_eval_duration"))
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 0


def test_a_chat_as_one_object_is_the_same(post, answer):
    found = post("chat", messages=MESSAGES, stream=False, options={"num_predict": 40}).json()
    assert found["message"] == {"role": "assistant", "content": answer.texts[0]}
    assert found["done"] is True
    assert found["eval_count"] == len(answer.tokens[0])


def test_generate_uses_the_template_unless_it_is_raw(served, post, answer):
    templated = post("generate", prompt=QUESTION, stream=False, options={"num_predict": 40}).json()
    assert templated["response"] == answer.texts[0]
    raw = post("generate", prompt=QUESTION, stream=False, raw=True, options={"num_predict": 8, "temperature": 0}).json()
    pipeline = served.pipeline()
    assert raw["response"] == pipeline.generate(QUESTION, max_new_tokens=8, apply_chat_template=False)
    system = post("generate", prompt=QUESTION, system="You are a fox.", stream=False, options={"num_predict": 8}).json()
    messages = [{"role": "system", "content": "You are a fox."}, *MESSAGES]
    assert system["response"] == pipeline.generate(messages, max_new_tokens=8).texts[0]


def test_options_reach_the_engine(post, answer):
    stop = answer.texts[0][12:18]
    found = post("generate", prompt=QUESTION, stream=False, options={"stop": [stop]}).json()
    assert found["response"] == answer.texts[0][: answer.texts[0].index(stop)]
    assert found["done_reason"] == "stop"
    short = post("generate", prompt=QUESTION, stream=False, options={"num_predict": 3}).json()
    assert short["eval_count"] == 3
    assert short["done_reason"] == "length"

    def drawn(seed):
        options = {"seed": seed, "temperature": 1.5, "top_k": 50, "top_p": 0.99, "min_p": 0.0, "num_predict": 24}
        return post("generate", prompt=QUESTION, stream=False, options=options).json()["response"]

    assert drawn(7) == drawn(7)
    assert len({drawn(seed) for seed in range(6)}) > 1
    assert drawn(0) == drawn(0)
    settings = {
        "num_ctx": 8192,
        "num_gpu": -1,
        "num_thread": 4,
        "num_batch": 512.0,
        "use_mmap": True,
        "num_predict": 40.0,
    }
    assert post("generate", prompt=QUESTION, stream=False, options=settings).json()["response"] == answer.texts[0]


def test_a_format_is_json_or_a_schema(post):
    pytest.importorskip("llguidance")
    found = post("chat", messages=MESSAGES, format=LETTER, stream=False).json()
    assert 0 <= json.loads(found["message"]["content"])["a"] <= 9
    found = post("generate", prompt=QUESTION, format="json", stream=False, options={"num_predict": 200}).json()
    assert found["done_reason"] == "length" or isinstance(json.loads(found["response"]), dict)
    assert post("generate", prompt=QUESTION, format="xml", stream=False).status_code == 400


def test_log_probabilities_are_those_of_the_tokens(post):
    found = post("generate", prompt=QUESTION, stream=False, logprobs=True, options={"num_predict": 6}).json()
    assert "".join(entry["token"] for entry in found["logprobs"]) == found["response"]
    assert all(entry["logprob"] <= 0 for entry in found["logprobs"])
    pieces = lines_of(post("generate", prompt=QUESTION, logprobs=True, options={"num_predict": 6}))
    assert [entry["token"] for piece in pieces for entry in piece.get("logprobs", [])] == [
        entry["token"] for entry in found["logprobs"]
    ]


def test_a_prompt_that_is_too_long_is_shortened_unless_truncate_is_false(post):
    text = "Tell me about the fox and the NPU. " * 400
    found = post("generate", prompt=text, stream=False, options={"num_predict": 4})
    assert found.status_code == 200
    assert 0 < found.json()["eval_count"] <= 4
    refused = post("generate", prompt=text, truncate=False)
    assert refused.status_code == 400
    assert "maximum context length" in refused.json()["error"]


def test_the_log_says_what_is_cut_or_ignored(caplog):
    """A context that a client asks for in vain once, each prompt that loses its middle, and no word of a prompt."""
    caplog.set_level("WARNING", "staticllm.server")
    with serving() as served:
        config = served.pipeline().config
        body = {"model": "demo", "prompt": "fox", "stream": False}
        for wanted in (config.max_seq_len, config.max_seq_len + 1, config.max_seq_len + 1):
            found = httpx.post(
                f"{served.url}/api/generate",
                json={**body, "options": {"num_ctx": wanted, "num_predict": 2}},
                timeout=60,
            )
            assert found.status_code == 200
        (line,) = [record.getMessage() for record in caplog.records]
        assert f"num_ctx={wanted} has no effect" in line
        assert "--max-prompt-len" in line
        caplog.clear()
        long = {**body, "prompt": "fox " * 3 * config.max_prompt_len, "options": {"num_predict": 2}}
        for stream in (False, True):
            assert (
                httpx.post(f"{served.url}/api/generate", json={**long, "stream": stream}, timeout=60).status_code == 200
            )
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 2
        kept = config.max_seq_len - ROOM  # which leaves room for an answer
        assert all(f"{kept} tokens are read" in line and "fox" not in line for line in lines)


def test_models_are_listed_with_a_tag_and_known_with_and_without_it(served, post):
    (listed,) = httpx.get(served.url + "/api/tags", timeout=60).json()["models"]
    assert listed["name"] == listed["model"] == "demo:latest"
    assert listed["size"] > 1 << 20
    assert len(listed["digest"]) == 64
    assert listed["details"]["family"] == "openvino"
    assert listed["details"]["parameter_size"].endswith("M")
    for name in ("demo", "demo:latest"):
        shown = httpx.post(served.url + "/api/show", json={"model": name}, timeout=60).json()
        assert shown["model_info"]["openvino.context_length"] == served.pipeline().config.max_seq_len
        assert shown["capabilities"] == ["completion"]
        assert "<|assistant|>" in shown["template"]
        assert post("chat", model=name, messages=MESSAGES, stream=False).json()["model"] == name
    assert httpx.get(served.url + "/api/version/", timeout=60).json()["version"].count(".") == 2


def test_keep_alive_says_when_a_model_is_unloaded(served, post):
    def expiry():
        models = httpx.get(served.url + "/api/ps", timeout=60).json()["models"]
        return models[0]["expires_at"] if models else None

    assert post("generate").json()["done_reason"] == "load"
    assert expiry().startswith("2318")
    post("generate", keep_alive="5m")
    assert expiry() < "2318"
    post("chat", messages=MESSAGES, stream=False, keep_alive=-1, options={"num_predict": 2})
    assert expiry().startswith("2318")
    assert post("chat", keep_alive=0).json()["done_reason"] == "unload"
    wait_for(lambda: expiry() is None, 60)
    assert served.pipeline() is None
    assert post("chat", keep_alive="1h30m").json()["done_reason"] == "load"
    assert served.pipeline() is not None


def test_an_answer_is_finished_before_its_model_is_unloaded(served, post, answer):
    found = lines_of(post("chat", messages=MESSAGES, keep_alive=0, options={"num_predict": 40}))
    assert "".join(piece["message"]["content"] for piece in found) == answer.texts[0]
    assert post("generate").json()["done_reason"] == "load"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (0, 0),
        (1.5, 1.5),
        (-1, float("inf")),
        ("0", 0),
        ("5m", 300),
        ("1h30m", 5400),
        ("-1s", float("inf")),
        ("90ms", 0.09),
    ],
)
def test_spans_of_time_are_gos(text, seconds):
    assert seconds_of(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", {"model": "nobody", "messages": MESSAGES}, 404, "'nobody' does not exist"),
        ("chat", {"messages": MESSAGES, "options": {"temprature": 1}}, 400, "options.temprature"),
        ("chat", {"messages": MESSAGES, "nonsense": 1}, 400, "nonsense"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "only text"),
        ("chat", {"messages": MESSAGES, "think": True}, 400, "does not support thinking"),
        ("chat", {"messages": MESSAGES, "tools": [{"function": {"name": "f"}}]}, 400, "does not support tools"),
        ("chat", {"messages": MESSAGES, "keep_alive": "soon"}, 400, "keep_alive"),
        ("generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("generate", {"prompt": "x", "context": [1, 2]}, 400, "context"),
        ("generate", {"prompt": "x", "options": {"mirostat": 1, "temperature": 1}}, 400, "mirostat"),
        ("embed", {"input": "x"}, 400, "chat model"),
        ("pull", {"name": "llama3"}, 400, "not supported"),
        ("create", {}, 400, "not supported"),
        ("show", {"model": "nobody"}, 404, "does not exist"),
    ],
)
def test_errors_are_one_line_in_ollamas_form(post, path, body, status, words):
    found = post(path, **body)
    assert found.status_code == status
    assert list(found.json()) == ["error"]
    assert words in found.json()["error"]
    assert "\n" not in found.json()["error"]


def test_other_layers_answer_in_ollamas_form_too():
    with serving(api_keys=("secret",), is_lazy=True) as served:
        found = httpx.get(served.url + "/api/tags", timeout=60)
        assert found.status_code == 401
        assert isinstance(found.json()["error"], str)
        headers = {"Authorization": "Bearer secret"}
        found = httpx.delete(served.url + "/api/delete", headers=headers, timeout=60)
        assert found.status_code == 400
        assert "not supported" in found.json()["error"]
        found = httpx.get(served.url + "/api/chat", headers=headers, timeout=60)
        assert found.status_code == 405
        assert isinstance(found.json()["error"], str)
        found = httpx.get(served.url + "/v1/nothing", headers=headers, timeout=60)
        assert found.json()["error"]["code"] == "not_found"


def test_a_closed_stream_is_cancelled(served):
    body = {"model": "demo", "prompt": QUESTION, "options": {"num_predict": 4000}, "raw": True}
    with httpx.stream("POST", served.url + "/api/generate", json=body, timeout=60) as response:
        next(response.iter_lines())
    served.wait_until_idle()


def test_an_answer_without_a_limit_is_bounded(served):
    from staticllm.server.answers.asks import options_of
    from staticllm.server.ollama.fields import OllamaGenerateRequest
    from staticllm.server.ollama.generation import asked_of

    for options in ({}, {"num_predict": -1}, {"num_predict": 0}):
        body = OllamaGenerateRequest(model="demo", options=options)
        assert options_of(asked_of(body, 100))["max_new_tokens"] == 1000
    body = OllamaGenerateRequest(model="demo", shift=False, options={"num_predict": -2})
    found = options_of(asked_of(body, 100))
    assert found["max_new_tokens"] == UNLIMITED
    assert "overflow" not in found


@pytest.fixture(scope="module")
def echo():
    with serving(pipelines={"demo": load_echo}) as served:
        yield lambda **body: httpx.post(served.url + "/api/chat", json={"model": "demo", **body}, timeout=60)


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def test_thinking_is_apart_from_content(echo):
    messages = asking("<think>first this</think>then that")
    found = echo(messages=messages, stream=False, think=True).json()["message"]
    assert (found["thinking"].strip(), found["content"].strip()) == ("first this", "then that")
    pieces = [piece["message"] for piece in lines_of(echo(messages=messages, think="high"))]
    assert "".join(piece.get("thinking", "") for piece in pieces).strip() == "first this"
    assert "".join(piece["content"] for piece in pieces).strip() == "then that"


def test_calls_are_objects_with_objects_as_arguments(echo):
    messages = asking(CALL + CALL.replace("Rome", "Oslo"))
    found = echo(messages=messages, stream=False, tools=[WEATHER]).json()
    functions = [call["function"] for call in found["message"]["tool_calls"]]
    assert [function["arguments"] for function in functions] == [{"city": city, "days": 2} for city in ("Rome", "Oslo")]
    assert [function["index"] for function in functions] == [0, 1]
    assert found["done_reason"] == "stop"
    pieces = lines_of(echo(messages=messages, tools=[WEATHER]))
    streamed = [call["function"] for piece in pieces for call in piece["message"].get("tool_calls", [])]
    assert streamed == functions
    answered = [
        *messages,
        found["message"],
        {"role": "tool", "tool_name": "weather", "content": "ANSWER:sunny"},
    ]
    content = echo(messages=answered, stream=False, tools=[WEATHER]).json()["message"]["content"]
    assert content.startswith('sunny"'), "the template shows no calls: the result is written as JSON, as GenAI does"


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '{"city": "Rome"}'])
def test_arguments_that_json_cannot_repeat_are_text(echo, arguments):
    messages = asking(f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>')
    found = echo(messages=messages, stream=False, tools=[WEATHER])
    assert found.status_code == 200
    assert echo(messages=messages, tools=[WEATHER]).status_code == 200
    message = found.json()["message"]
    told = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
    if "Rome" in arguments:
        assert told == [{"city": "Rome"}]
    else:
        assert told == [{"arguments": arguments}] or (not told and arguments in message["content"])


def test_texts_are_embedded_as_by_the_pipeline(tmp_path):
    with serving([model_spec(f"tiny={a_directory(tmp_path)}")]) as served:
        expected = served.pipeline("tiny").embed_documents(TEXTS)

        def embed(path="embed", **body):
            return httpx.post(f"{served.url}/api/{path}", json={"model": "tiny:latest", **body}, timeout=60)

        found = embed(input=TEXTS).json()
        np.testing.assert_allclose(found["embeddings"], expected, rtol=1e-5, atol=1e-6)
        assert found["prompt_eval_count"] > len(TEXTS)
        assert found["total_duration"] > 0
        assert embed(input=TEXTS[0]).json()["embeddings"] == found["embeddings"][:1]
        np.testing.assert_allclose(embed("embeddings", prompt=TEXTS[0]).json()["embedding"], expected[0], atol=1e-6)
        assert embed(input=[]).json()["embeddings"] == []
        assert len(embed(input="x", dimensions=4).json()["embeddings"][0]) == 4
        long = "many words " * 2000
        assert embed(input=long).status_code == 200
        refused = embed(input=long, truncate=False)
        assert refused.status_code == 400
        assert "context length" in refused.json()["error"]
        (listed,) = httpx.get(served.url + "/api/ps", timeout=60).json()["models"]
        assert listed["context_length"] == served.pipeline("tiny").max_length
        shown = httpx.post(served.url + "/api/show", json={"model": "tiny"}, timeout=60).json()
        assert shown["capabilities"] == ["embedding"]
        assert "embedding model" in embed("chat", messages=MESSAGES).json()["error"]

"""Odd requests of clients, as they were recorded with the versions of the extra ``clients``: sent again here, and compared with
what the installed versions send. What is not installed is skipped.
"""

from __future__ import annotations

import base64
import json

import httpx
import pytest
from support.encoders.encoder_directories import a_directory
from support.models.echo_model import CALL, asking, load_echo
from support.server.recorded import recording
from support.server.served import serving

from staticllm.server.models.served import demo_spec, model_spec

CHAT = "/v1/chat/completions"
PERSON = '{"name": "Ada", "age": 36}'
FIELDS = {"name": {"title": "Name", "type": "string"}, "age": {"title": "Age", "type": "integer"}}
SCHEMA = {"properties": FIELDS, "required": ["name", "age"], "title": "Person", "type": "object"}
STRICT = {**SCHEMA, "additionalProperties": False}
FUNCTION = {
    "name": "Person",
    "description": "Correctly extracted `Person`",
    "parameters": {**SCHEMA, "required": ["age", "name"]},
}
WEATHER = {
    "properties": {"city": {"title": "City", "type": "string"}, "days": {"title": "Days", "type": "integer"}},
    "required": ["city", "days"], "type": "object", "additionalProperties": False,
}  # fmt: skip
BROWSER = {"accept-language": "*", "sec-fetch-mode": "cors"}
"""The npm clients run on fetch, which says so; they have no Origin."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model that answers what it is told to, and an embedder."""
    specs = [demo_spec(), model_spec(f"tiny={a_directory(tmp_path_factory.mktemp('embedder'))}")]
    with recording() as recorder, serving(specs, pipelines={"demo": load_echo}) as served:
        served.recorder = recorder()
        yield served


@pytest.fixture
def post(served):
    with httpx.Client(base_url=served.url, timeout=120) as client:

        def send(path, body, **headers):
            found = client.post(path, json=body, headers=headers)
            assert found.status_code == 200, found.text
            return found

        yield send


def sent(served, run):
    """Return the requests that a function sends."""
    served.recorder.take()
    run()
    return served.recorder.take()


class TestSentAgain:
    def test_openais_client_parses_a_strict_schema_without_a_stream(self, post):
        pytest.importorskip("llguidance")
        form = {"type": "json_schema", "json_schema": {"schema": STRICT, "name": "Person", "strict": True}}
        body = {"messages": asking(PERSON), "model": "demo", "response_format": form, "stream": False}
        found = post(CHAT, body, **{"x-stainless-helper-method": "chat.completions.parse"}).json()
        assert json.loads(found["choices"][0]["message"]["content"]) == json.loads(PERSON)

    def test_openais_client_sends_a_strict_tool(self, post):
        tool = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": WEATHER}}
        found = post(CHAT, {"messages": asking(CALL), "model": "demo", "stream": False, "tools": [tool]}).json()
        assert found["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"

    @pytest.mark.parametrize("headers", [{}, BROWSER])
    def test_openais_clients_ask_for_base64_unasked(self, post, headers):
        body = {"input": ["one", "two"], "model": "tiny", "encoding_format": "base64"}
        vectors = [each["embedding"] for each in post("/v1/embeddings", body, **headers).json()["data"]]
        assert len(vectors) == 2
        assert all(len(base64.b64decode(vector)) % 4 == 0 for vector in vectors)

    def test_llama_index_describes_a_function_over_two_lines_and_is_not_strict(self, post):
        function = {"name": "weather", "description": "weather(city: str, days: int) -> str\nTell the weather.",
                    "parameters": WEATHER, "strict": False}  # fmt: skip
        body = {"messages": asking(CALL), "model": "demo", "parallel_tool_calls": False, "stream": False, "temperature": 0.1,
                "tool_choice": "auto", "tools": [{"type": "function", "function": function}]}  # fmt: skip
        (call,) = post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "days": 2}

    def test_instructor_sends_a_failed_answer_and_its_errors_back(self, post):
        pytest.importorskip("llguidance")
        system = {
            "role": "system",
            "content": f"\n            As a genius expert: json_schema:\n\n\n            {SCHEMA}\n",
        }
        errors = {
            "role": "user",
            "content": "Correct your JSON ONLY RESPONSE, based on the following errors:\nage\n  missing",
        }
        body = {"messages": [system, *asking('{"name":"Ada"}'), {"role": "assistant", "content": '{"name":"Ada"}'}, errors,
                             *asking(PERSON)], "model": "demo", "response_format": {"type": "json_object"}}  # fmt: skip
        assert json.loads(post(CHAT, body).json()["choices"][0]["message"]["content"]) == json.loads(PERSON)

    def test_instructor_names_the_function_that_must_be_called(self, post):
        pytest.importorskip("llguidance")
        tools = [{"type": "function", "function": FUNCTION}]
        body = {"messages": asking(PERSON), "model": "demo", "max_tokens": 64, "tools": tools,
                "tool_choice": {"type": "function", "function": {"name": "Person"}}}  # fmt: skip
        assert post(CHAT, body).json()["choices"][0]["finish_reason"] in ("length", "tool_calls")

    def test_ollamas_npm_client_thinks_not_and_streams_not(self, post):
        tools = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": WEATHER}}]
        body = {"model": "demo", "messages": asking(CALL), "tools": tools, "think": False, "stream": False}
        found = post("/api/chat", body, **BROWSER).json()
        assert found["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome", "days": 2}
        assert len(post("/api/embed", {"model": "tiny", "input": ["one", "two"]}, **BROWSER).json()["embeddings"]) == 2


class TestWhatTheInstalledVersionsSend:
    @pytest.fixture
    def openai(self, served):
        with pytest.importorskip("openai").OpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0) as client:
            yield client

    @pytest.fixture
    def person(self):
        return pytest.importorskip("pydantic").create_model("Person", name=(str, ...), age=(int, ...))

    def test_openais_client(self, served, openai, person):
        pytest.importorskip("llguidance")
        parse = lambda: openai.chat.completions.parse(model="demo", messages=asking(PERSON), response_format=person)  # noqa: E731
        ((_, path, body),) = sent(served, parse)
        assert path == CHAT
        assert body["stream"] is False
        assert body["response_format"]["json_schema"] == {"schema": STRICT, "name": "Person", "strict": True}
        ((_, path, body),) = sent(served, lambda: openai.embeddings.create(model="tiny", input="a"))
        assert (path, body["encoding_format"]) == ("/v1/embeddings", "base64")

    def test_llama_index(self, served):
        package = pytest.importorskip("llama_index.llms.openai_like")
        tools = pytest.importorskip("llama_index.core.tools")

        def weather(city: str, days: int) -> str:
            """Tell the weather."""
            return ""

        model = package.OpenAILike(
            api_base=served.url + "/v1",
            api_key="any",
            model="demo",
            is_chat_model=True,
            is_function_calling_model=True,
            max_retries=0,
        )
        tool = tools.FunctionTool.from_defaults(weather)
        call = lambda: model.chat_with_tools([tool], user_msg=asking(CALL)[0]["content"])  # noqa: E731
        ((_, path, body),) = sent(served, call)
        (function,) = [each["function"] for each in body["tools"]]
        assert path == CHAT
        assert body["parallel_tool_calls"] is False
        assert body["temperature"] == 0.1
        assert function["strict"] is False
        assert "\n" in function["description"]

    def test_instructor(self, served, openai, person):
        pytest.importorskip("llguidance")
        package = pytest.importorskip("instructor")
        client = package.from_openai(openai, mode=package.Mode.JSON)
        options = {"model": "demo", "messages": asking('{"name":"Ada"}'), "response_model": person, "max_retries": 2}

        def ask():
            with pytest.raises(Exception, match="age"):
                client.chat.completions.create(**options)

        requests = [body for _, _, body in sent(served, ask)]
        assert len(requests) > 1
        assert requests[0]["messages"][0]["role"] == "system"
        assert [each["role"] for each in requests[1]["messages"][-3:]] == ["user", "assistant", "user"]
        assert requests[1]["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize("origin", ["tauri://localhost", "http://tauri.localhost", "app://localhost", "file://"])
@pytest.mark.parametrize("base", ["/v1", "", "/v1/", "/api/v0"])
def test_a_desktop_application_lists_models_and_streams(served, origin, base):
    """As Jan and AnythingLLM do, in the forms of the URL that people type: a preflight, the models, and a stream in its order."""
    root = served.url + base.rstrip("/")
    with httpx.Client(timeout=120, headers={"Origin": origin, "Authorization": "Bearer any"}) as client:
        asked = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        preflight = client.options(root + "/chat/completions", headers=asked)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == origin
        slash = "/" if base.endswith("/") else ""
        listed = client.get(f"{root}/models{slash}").json()["data"]
        assert {"demo", "tiny"} == {model["id"] for model in listed}
        options = {"model": "demo", "stream": True, "temperature": 0.7, "stream_options": {"include_usage": True}}
        messages = [{"role": "system", "content": ""}, *asking("one two")]
        found = client.post(f"{root}/chat/completions{slash}", json={**options, "messages": messages})
    assert found.status_code == 200
    assert found.headers["access-control-allow-origin"] == origin
    *lines, done = [line.removeprefix("data: ") for line in found.text.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines]
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-2]["choices"][0]["delta"] == {}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0

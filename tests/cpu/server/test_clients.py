"""Tests clients that nobody here wrote, unchanged: each chats, streams, calls tools or embeds through the server.

They are in the extra ``clients``; what is not installed is skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import textwrap
from datetime import datetime

import httpx
import numpy as np
import pytest
from support.encoders.encoder_directories import a_directory
from support.models.echo_model import CALL, asking, load_demo_with_tools, load_echo
from support.server.recorded import recording
from support.server.served import serving

from staticllm.server.models.served import demo_spec, model_spec

QUESTION = "What is an NPU?"
MESSAGES = [{"role": "user", "content": QUESTION}]
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks another host when it is imported
PERSON = '{"name": "Ada", "age": 36}'


@pytest.fixture(scope="module", autouse=True)
def recorded():
    with recording() as recorder:
        yield recorder


@pytest.fixture(scope="module")
def served(tmp_path_factory, recorded):
    """The embedded model, and an embedder."""
    specs = [demo_spec(), model_spec(f"tiny={a_directory(tmp_path_factory.mktemp('embedder'))}")]
    with serving(specs) as served:
        served.recorder = recorded()
        yield served


@pytest.fixture(scope="module")
def echo(recorded):
    """A model that answers what it is told to."""
    with serving(pipelines={"demo": load_echo}) as served:
        served.recorder = recorded()
        yield served


@pytest.fixture(scope="module")
def answer(served):
    """The answer of the pipeline itself."""
    return served.pipeline().generate(MESSAGES, max_new_tokens=60).texts[0]


def weather(city: str, days: int) -> str:
    """Tell the weather.

    Args:
        city: Where.
        days: For how long.
    """
    return f"{city} {days}"


class TestOllama:
    @pytest.fixture(scope="class")
    def client(self, served):
        return pytest.importorskip("ollama").Client(host=served.url)

    def test_it_chats_and_streams(self, client, answer):
        found = client.chat(model="demo", messages=MESSAGES, options={"num_predict": 60})
        assert found.message.content == answer
        assert found.done_reason == "stop"
        assert found.eval_count > 10
        pieces = list(client.chat(model="demo", messages=MESSAGES, stream=True, options={"num_predict": 60}))
        assert "".join(piece.message.content for piece in pieces) == answer
        assert pieces[-1].done
        assert client.generate(model="demo", prompt=QUESTION, options={"num_predict": 60}).response == answer
        pieces = client.generate(model="demo:latest", prompt=QUESTION, stream=True, options={"num_predict": 60})
        assert "".join(piece.response for piece in pieces) == answer

    def test_it_embeds_and_lists(self, client):
        vectors = client.embed(model="tiny", input=["one", "two"]).embeddings
        assert len(vectors) == 2
        assert len(vectors[0]) == len(client.embeddings(model="tiny", prompt="one").embedding)
        names = {model.model for model in client.list().models}
        assert names == {"demo:latest", "tiny:latest"}
        assert {model.model for model in client.ps().models} <= names
        shown = client.show("demo")
        assert shown.capabilities == ["completion"]
        assert shown.modelinfo["openvino.context_length"] == 2048  # the positions in its config.json
        assert shown.details.family == "openvino"

    def test_it_takes_a_schema(self, client):
        pytest.importorskip("llguidance")
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        found = client.chat(model="demo", messages=MESSAGES, format=schema)
        assert isinstance(json.loads(found.message.content)["a"], bool)

    def test_it_raises_our_errors(self, client):
        ollama = pytest.importorskip("ollama")
        with pytest.raises(ollama.ResponseError, match="does not exist") as error:
            client.chat(model="nobody", messages=MESSAGES)
        assert error.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="not supported"):
            client.pull("llama3")
        with pytest.raises(ollama.ResponseError, match="not supported"):
            client.delete("llama3")
        with pytest.raises(ollama.ResponseError, match="Unknown parameter"):
            client.chat(model="demo", messages=MESSAGES, options={"temprature": 1})

    def test_it_calls_functions_and_thinks(self, echo):
        ollama = pytest.importorskip("ollama")
        client = ollama.Client(host=echo.url)
        messages = asking(f"<think>hm</think>{CALL}")
        found = client.chat(model="demo", messages=messages, tools=[weather], think=True).message
        assert found.thinking.strip() == "hm"
        (call,) = found.tool_calls
        assert call.function.name == "weather"
        assert call.function.arguments == {"city": "Rome", "days": 2}
        result = {"role": "tool", "tool_name": "weather", "content": "ANSWER:sunny"}
        found = client.chat(model="demo", messages=[*messages, found, result], tools=[weather])
        assert found.message.content.startswith("sunny")  # the template shows no results: they are written as JSON

    def test_its_async_client_is_cancelled_by_leaving(self, served):
        ollama = pytest.importorskip("ollama")

        async def leave():
            client = ollama.AsyncClient(host=served.url)
            options = {"num_predict": 4000}
            async for _ in await client.generate(model="demo", prompt=QUESTION, raw=True, stream=True, options=options):
                break

        asyncio.run(leave())
        served.wait_until_idle()


class TestLangChain:
    @pytest.fixture(scope="class")
    def package(self):
        return pytest.importorskip("langchain_openai")

    def model(self, package, served, **options):
        return package.ChatOpenAI(base_url=served.url + "/v1", api_key="any", model="demo", max_retries=0, **options)

    def test_it_chats_and_streams(self, package, served, answer):
        model = self.model(package, served, max_tokens=60)
        found = model.invoke(QUESTION)
        assert found.content == answer
        assert found.usage_metadata["output_tokens"] > 10
        pieces = list(model.stream(QUESTION))
        assert "".join(piece.content for piece in pieces) == answer
        assert asyncio.run(model.ainvoke(QUESTION)).content == answer

    def test_it_uses_the_responses_api(self, package, served, answer):
        model = self.model(package, served, max_tokens=60, use_responses_api=True)
        found = model.invoke(QUESTION)
        assert found.text == answer
        assert "".join(piece.text for piece in model.stream(QUESTION)) == answer

    def test_it_calls_tools(self, package, echo):
        model = self.model(package, echo).bind_tools([weather])
        (call,) = model.invoke(asking(CALL)).tool_calls
        assert call["name"] == "weather"
        assert call["args"] == {"city": "Rome", "days": 2}

    def test_it_gets_structured_answers(self, package, echo):
        pydantic = pytest.importorskip("pydantic")
        person = pydantic.create_model("Person", name=(str, ...), age=(int, ...))
        found = self.model(package, echo).with_structured_output(person, method="json_mode").invoke(asking(PERSON))
        assert (found.name, found.age) == ("Ada", 36)

    def test_it_embeds_texts(self, package, served):
        embedder = package.OpenAIEmbeddings(
            base_url=served.url + "/v1", api_key="any", model="tiny", check_embedding_ctx_length=False
        )
        assert len(embedder.embed_documents(["one", "two"])) == 2


class TestLlamaIndex:
    def model(self, served, **options):
        package = pytest.importorskip("llama_index.llms.openai_like")
        return package.OpenAILike(
            api_base=served.url + "/v1", api_key="any", model="demo", is_chat_model=True, max_retries=0, **options
        )

    def test_it_chats_and_streams(self, served, answer):
        core = pytest.importorskip("llama_index.core.llms")
        model = self.model(served, max_tokens=60, context_window=1024, temperature=0.0)
        messages = [core.ChatMessage(role="user", content=QUESTION)]
        assert model.chat(messages).message.content == answer
        assert list(model.stream_chat(messages))[-1].message.content == answer
        assert model.complete(QUESTION).text == answer

    def test_it_calls_tools(self, echo):
        tools = pytest.importorskip("llama_index.core.tools")
        model = self.model(echo, is_function_calling_model=True)
        tool = tools.FunctionTool.from_defaults(weather)
        found = model.chat_with_tools([tool], user_msg=asking(CALL)[0]["content"])
        (call,) = model.get_tool_calls_from_response(found)
        assert call.tool_name == "weather"
        assert call.tool_kwargs == {"city": "Rome", "days": 2}


@pytest.mark.parametrize(
    ("program", "module"),
    [("LangChain", "langchain_openai"), ("LlamaIndex", "llama_index.embeddings.openai_like")],
)
def test_documents_are_searched_as_the_docs_say(program, module, served, root):
    pytest.importorskip(module)
    page = (root / "docs" / "server.md").read_text(encoding="utf-8")
    snippet = re.search(rf"- \*\*{program}\*\*.*?```python\n(.*?)```", page, re.DOTALL)[1]
    for old, new in {'"chat"': '"demo"', '"encoder"': '"tiny"', "http://127.0.0.1:8000": served.url}.items():
        snippet = snippet.replace(old, new)
    texts = re.findall(r'"((?:The office|The canteen)[^"]*)"', snippet)
    values = {}
    exec(textwrap.dedent(snippet), values)
    vectors = served.pipeline("tiny").encode([*texts, "When can I eat soup?"], prompt="")
    nearest = texts[int(np.argmax(vectors[:-1] @ vectors[-1]))]
    found = values["found"].page_content if program == "LangChain" else values["answer"].source_nodes[0].get_content()
    assert len(texts) == 2
    assert found == nearest


class TestLiteLLM:
    @pytest.fixture(scope="class")
    def package(self):
        return pytest.importorskip("litellm")

    def test_it_chats_and_streams(self, package, served, answer):
        options = {"model": "openai/demo", "api_base": served.url + "/v1", "api_key": "any", "max_tokens": 60}
        assert package.completion(messages=MESSAGES, **options).choices[0].message.content == answer
        pieces = package.completion(messages=MESSAGES, stream=True, **options)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer

    def test_it_speaks_ollamas_api_too(self, package, served, answer):
        options = {"model": "ollama_chat/demo", "api_base": served.url, "max_tokens": 60}
        assert package.completion(messages=MESSAGES, **options).choices[0].message.content == answer
        pieces = package.completion(messages=MESSAGES, stream=True, **options)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer

    @pytest.mark.parametrize("size", [20_000, 3 << 20])
    def test_it_knows_a_prompt_that_is_too_long(self, package, served, size):
        """By the words of OpenAI's; programs on top of it (aider, OpenHands) then shorten the conversation."""
        text = "a " * size
        options = {"api_base": served.url + "/v1", "api_key": "any", "max_tokens": 2, "max_retries": 0}
        for is_streamed in (False, True):
            with pytest.raises(package.ContextWindowExceededError):
                messages = [{"role": "user", "content": text}]
                list(package.completion(model="openai/demo", messages=messages, stream=is_streamed, **options))
            with pytest.raises(package.ContextWindowExceededError):
                model = "text-completion-openai/demo"
                list(package.text_completion(model=model, prompt=text, stream=is_streamed, **options))
        with pytest.raises(package.ContextWindowExceededError):
            tools = [{"type": "function", "function": {"name": "f", "description": text}}]
            package.completion(model="openai/demo", messages=MESSAGES, tools=tools, **options)

    def test_it_embeds_texts(self, package, served):
        found = package.embedding(model="openai/tiny", input=["one"], api_base=served.url + "/v1", api_key="any")
        assert len(found.data) == 1


class TestInstructor:
    @pytest.fixture(scope="class")
    def package(self):
        pytest.importorskip("llguidance")
        return pytest.importorskip("instructor")

    @pytest.mark.parametrize("mode", ["JSON", "JSON_SCHEMA"])
    def test_it_gets_objects(self, package, echo, mode):
        openai, pydantic = pytest.importorskip("openai"), pytest.importorskip("pydantic")
        person = pydantic.create_model("Person", name=(str, ...), age=(int, ...))
        with openai.OpenAI(base_url=echo.url + "/v1", api_key="any", max_retries=0) as plain:
            client = package.from_openai(plain, mode=getattr(package.Mode, mode))
            found = client.chat.completions.create(
                model="demo", messages=asking(PERSON), response_model=person, max_retries=0
            )
        assert (found.name, found.age) == ("Ada", 36)

    def test_it_gets_objects_from_calls_that_it_requires(self, package, recorded):
        openai, pydantic = pytest.importorskip("openai"), pytest.importorskip("pydantic")
        name, age = pydantic.Field(max_length=8), pydantic.Field(ge=0, le=99)
        person = pydantic.create_model("Person", name=(str, name), age=(int, age))
        with (
            serving(pipelines={"demo": load_demo_with_tools}) as served,
            openai.OpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0) as plain,
        ):
            found = package.from_openai(plain, mode=package.Mode.TOOLS).chat.completions.create(
                model="demo", messages=MESSAGES, response_model=person, max_retries=0, max_tokens=200
            )
        assert len(found.name) <= 8
        assert 0 <= found.age <= 99


class TestWhatClientsSend:
    """The odd ones among their requests, as they were recorded with the versions of the extra ``clients``."""

    def sent(self, served, run):
        served.recorder.take()
        run()
        return served.recorder.take()

    def test_ollamas_client_sends_an_empty_list_of_tools(self, served):
        client = pytest.importorskip("ollama").Client(host=served.url)
        chat = lambda: client.chat(model="demo", messages=MESSAGES, options={"num_predict": 2})  # noqa: E731
        ((method, path, body),) = self.sent(served, chat)
        assert (method, path) == ("POST", "/api/chat")
        assert body["tools"] == []
        assert body["stream"] is False

    def test_ollamas_client_deletes_with_a_method_of_its_own(self, served):
        ollama = pytest.importorskip("ollama")

        def delete():
            with pytest.raises(ollama.ResponseError):
                ollama.Client(host=served.url).delete("demo")

        ((method, path, _),) = self.sent(served, delete)
        assert (method, path) == ("DELETE", "/api/delete")

    def test_langchain_says_max_completion_tokens(self, served):
        package = pytest.importorskip("langchain_openai")
        options = {"base_url": served.url + "/v1", "api_key": "any", "model": "demo", "max_tokens": 2}
        ((_, path, body),) = self.sent(served, lambda: package.ChatOpenAI(**options).invoke(QUESTION))
        assert path == "/v1/chat/completions"
        assert body["max_completion_tokens"] == 2
        assert "max_tokens" not in body
        model = package.ChatOpenAI(**options, use_responses_api=True)
        ((_, path, body),) = self.sent(served, lambda: model.invoke(QUESTION))
        assert path == "/v1/responses"
        assert body["input"] == [{"type": "message", **MESSAGES[0]}]

    def test_litellm_sends_empty_lists_of_images(self, served):
        package = pytest.importorskip("litellm")
        options = {"messages": MESSAGES, "api_base": served.url, "max_tokens": 2}
        ((_, path, body),) = self.sent(served, lambda: package.completion(model="ollama_chat/demo", **options))
        assert path == "/api/chat"
        assert body["messages"][0]["images"] == []
        ((_, path, body),) = self.sent(served, lambda: package.completion(model="ollama/demo", **options))
        assert path == "/api/generate" and body["images"] == [] and body["prompt"].startswith("### User:")


class TestApplications:
    """The calls of applications that are not installed here, written down from their sources."""

    def post(self, served, path, **body):
        return httpx.post(served.url + path, json={"model": "demo", **body}, timeout=60)

    def test_zed_with_lm_studio(self, served):
        """Its types of models, formats and states are closed: one unknown word, and it shows no model at all."""
        listed = httpx.get(served.url + "/api/v0/models", timeout=60).json()["data"]
        assert [model["type"] for model in listed] == ["llm", "embeddings"]
        for model in listed:
            assert model["compatibility_type"] in ("gguf", "mlx")
            assert model["state"] in ("loaded", "loading", "not-loaded")
            assert all(isinstance(model[name], str) for name in ("id", "object", "publisher", "arch"))
        body = {
            "messages": [{"role": "assistant", "content": None}, *MESSAGES],
            "stream": True,
            "max_tokens": 2,
            "stop": [],
        }
        found = self.post(served, "/api/v0/chat/completions", **body)
        lines = [line.removeprefix("data: ") for line in found.text.splitlines() if line.startswith("data: ")]
        for line in lines[:-1]:
            assert isinstance(json.loads(line)["choices"], list)
            assert json.loads(line)["object"]

    def test_zed_with_ollama(self, served, echo):
        for model in httpx.get(served.url + "/api/tags", timeout=60).json()["models"]:
            assert all(isinstance(model[name], str) for name in ("name", "modified_at", "digest"))
            assert isinstance(model["details"]["format"], str)
            assert isinstance(model["details"]["families"], list)
        body = {"stream": True, "keep_alive": -1, "tools": [], "think": None,
                "options": {"num_ctx": 4096, "num_predict": None, "stop": [], "temperature": 1.0, "top_p": None}}  # fmt: skip
        assistant = {"role": "assistant", "content": "", "tool_calls": None, "thinking": None}
        messages = [*MESSAGES, assistant, {"role": "tool", "tool_name": "f", "content": "x"}, *MESSAGES]
        body["options"]["num_predict"] = 3
        found = [
            json.loads(line) for line in self.post(served, "/api/chat", messages=messages, **body).text.splitlines()
        ]
        assert all(line["message"]["role"] == "assistant" and "content" in line["message"] for line in found)

    def test_continue(self, served):
        shown = httpx.post(served.url + "/api/show", json={"name": "demo"}, timeout=60).json()
        assert shown["parameters"] == ""
        assert ".Suffix" not in shown["template"]
        options = {"temperature": 0.5, "num_predict": 3, "num_ctx": 4096, "stop": ["x y z"], "use_mmap": True}
        found = self.post(
            served, "/api/generate", prompt="The", raw=True, options=options, keep_alive=1800, stream=True
        )
        assert all(isinstance(json.loads(line)["response"], str) for line in found.text.splitlines())

    def test_open_webui(self, served):
        assert (
            len([int(part) for part in httpx.get(served.url + "/api/version", timeout=60).json()["version"].split(".")])
            == 3
        )
        assert self.post(served, "/api/generate", prompt="").json()["done_reason"] == "load"
        expiry = httpx.get(served.url + "/api/ps", timeout=60).json()["models"][0]["expires_at"]
        datetime.fromisoformat(expiry.replace("Z", "+00:00"))
        body = {"messages": MESSAGES, "stream": True, "options": {"num_predict": 2}, "keep_alive": "5m"}
        assert self.post(served, "/api/chat", **body, model="demo:latest").status_code == 200
        body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
        assert self.post(served, "/chat/completions", **body).status_code == 200

    def test_jan(self, served):
        """It asks as its window does, and merges the assistant's parameters under its own names into the body."""
        headers = {"Origin": "tauri://localhost", "x-api-key": "any", "Authorization": "Bearer any"}
        listed = httpx.get(served.url + "/v1/models", headers=headers, timeout=60).json()["data"]
        assert "demo" in [model["id"] for model in listed]
        parameters = {"temperature": 0.7, "top_k": 2, "top_p": 0.95, "frequency_penalty": 0.7, "presence_penalty": 0.7,
                      "repeat_penalty": 1.12, "max_output_tokens": 2, "ctx_len": 8192}  # fmt: skip
        body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, **parameters}
        found = self.post(served, "/v1/chat/completions", **body)
        usage = json.loads(found.text.split("data: ")[-2])["usage"]
        assert found.status_code == 200
        assert usage["completion_tokens"] <= 2
        refused = self.post(served, "/v1/chat/completions", **body, max_tokens=3)
        assert refused.status_code == 400
        assert "give one" in refused.json()["error"]["message"]

    def test_anythingllm(self, served):
        body = {"messages": MESSAGES, "stream": True, "temperature": 0.7, "max_tokens": 2}
        assert self.post(served, "/v1/chat/completions", **body).status_code == 200
        embedded = self.post(served, "/v1/embeddings", model="tiny", input=["a", "b"], encoding_format="base64")
        assert len(embedded.json()["data"]) == 2

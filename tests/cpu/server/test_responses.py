"""Tests the Responses API with OpenAI's client: whole and streamed answers, conversations that the server remembers, calls."""

from __future__ import annotations

import asyncio
import json
import tracemalloc

import httpx
import pytest
from support.models.echo_model import CALL, asking, load_echo
from support.server.served import serving

from staticllm.server.http.errors import ApiError
from staticllm.server.responses.store import ResponseStore, StoredResponse

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

pytestmark = pytest.mark.usefixtures("shared_programs")

QUESTION = "What is an NPU?"
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


def client_of(served):
    return openai.OpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def client(served):
    with client_of(served) as client:
        yield client


@pytest.fixture(scope="module")
def answer(served):
    """The answer of the pipeline itself."""
    return served.pipeline().generate(MESSAGES, max_new_tokens=60)


def test_an_answer_is_that_of_the_pipeline(client, answer):
    found = client.responses.create(model="demo", input=QUESTION, max_output_tokens=60)
    assert found.output_text == answer.texts[0]
    assert found.status == "completed"
    assert found.output[0].role == "assistant"
    assert found.object == "response"
    assert found.usage.output_tokens == len(answer.tokens[0])
    assert found.usage.input_tokens == answer.perf_metrics.get_num_input_tokens()
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    cut = client.responses.create(model="demo", input=QUESTION, max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_a_stream_has_the_events_that_the_client_accumulates(client, answer):
    with client.responses.stream(model="demo", input=QUESTION, max_output_tokens=60) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == answer.texts[0]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.texts[0]
    assert len(deltas) > 5
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"
    ]  # fmt: skip
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1


def test_a_stream_is_sent_as_named_events_without_a_mark_of_the_end(served):
    body = {"model": "demo", "input": QUESTION, "stream": True, "max_output_tokens": 3}
    with httpx.stream("POST", served.url + "/v1/responses", json=body, timeout=60) as response:
        events = response.read().decode().strip().split("\n\n")
    for event in events:
        name, data = event.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert "response.incomplete" in events[-1]


def test_the_server_remembers_a_conversation(served, client):
    first = client.responses.create(model="demo", input="Tell me about a fox. " * 8, max_output_tokens=8)
    second = client.responses.create(
        model="demo", input="And then?", previous_response_id=first.id, max_output_tokens=8
    )
    messages = [
        {"role": "user", "content": "Tell me about a fox. " * 8},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    assert second.output_text == served.pipeline().generate(messages, max_new_tokens=8).texts[0]
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert second.previous_response_id == first.id
    third = client.responses.create(
        model="demo", input="More.", previous_response_id=second.id, instructions="Be brief.", max_output_tokens=8
    )
    system = [{"role": "system", "content": "Be brief."}, *messages]
    system += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "More."}]
    assert third.output_text == served.pipeline().generate(system, max_new_tokens=8).texts[0]


def test_answers_are_retrieved_and_deleted(client):
    made = client.responses.create(model="demo", input=QUESTION, max_output_tokens=4)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    (item,) = client.responses.input_items.list(made.id).data
    assert item.content[0].text == QUESTION
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="demo", input="x", previous_response_id=made.id)
    assert error.value.code == "previous_response_not_found"
    unstored = client.responses.create(model="demo", input=QUESTION, max_output_tokens=4, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_input_items_are_listed_in_pages(served, client):
    asked = [{"role": "user", "content": name} for name in "abc"]
    made = client.responses.create(model="demo", input=asked, max_output_tokens=1)

    def texts(**query):
        return [item.content for item in client.responses.input_items.list(made.id, **query)]

    assert texts() == ["c", "b", "a"]
    assert texts(order="asc") == ["a", "b", "c"]
    first = client.responses.input_items.list(made.id, limit=2)
    assert [item.content for item in first.data] == ["c", "b"]
    assert first.has_more
    assert texts(after=first.last_id) == ["a"], "the client reads on"
    assert texts(limit=1) == ["c", "b", "a"], "the client reads on"
    for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
        found = httpx.get(f"{served.url}/v1/responses/{made.id}/input_items?{query}", timeout=60)
        assert found.status_code == 400
        assert found.json()["error"]["param"] == query.partition("=")[0]


def test_a_query_that_would_be_ignored_is_refused(served, client):
    """A client that asks for a stream of what is remembered would wait for events."""
    made = client.responses.create(model="demo", input="Once", max_output_tokens=2)
    url = f"{served.url}/v1/responses/{made.id}"
    for path, name in (
        ("?stream=true", "stream"), ("?starting_after=2", "starting_after"), ("?x=1", "x"), ("/input_items?before=y", "before"),
        ("/input_items?offset=1&limit=1", "offset"),
    ):  # fmt: skip
        found = httpx.get(url + path, timeout=60)
        assert (found.status_code, found.json()["error"]["param"]) == (400, name), path
    assert httpx.delete(f"{url}?x=1", timeout=60).json()["error"]["param"] == "x"
    with pytest.raises(openai.BadRequestError, match="returned as a whole"):
        client.responses.retrieve(made.id, stream=True)
    assert client.responses.retrieve(made.id, include=["message.output_text.logprobs"]).id == made.id
    assert httpx.get(f"{url}?stream=false", timeout=60).json()["id"] == made.id


def test_a_schema_is_kept(client):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    format = {"type": "json_schema", "name": "letter", "schema": schema, "strict": True}
    found = client.responses.create(model="demo", input=QUESTION, text={"format": format})
    assert 0 <= json.loads(found.output_text)["a"] <= 9
    assert found.text.format.schema_ == schema


def test_the_async_client_reads_streams(served, answer):
    async def read():
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0) as client:
            stream = await client.responses.create(model="demo", input=QUESTION, max_output_tokens=60, stream=True)
            return [event async for event in stream]

    events = asyncio.run(read())
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == answer.texts[0]


@pytest.fixture(scope="module")
def echo():
    with serving(pipelines={"demo": load_echo}) as served, client_of(served) as client:
        yield client


def test_calls_and_their_results_are_items(echo):
    text = CALL + "\n" + CALL.replace("Rome", "Oslo")
    found = echo.responses.create(model="demo", input=asking(text), tools=[TOOL])
    calls = [item for item in found.output if item.type == "function_call"]
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
    assert len(found.output) == 2
    with echo.responses.stream(model="demo", input=asking(text), tools=[TOOL]) as stream:
        events = list(stream)
    streamed = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.arguments for item in streamed] == [call.arguments for call in calls]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == "".join(call.arguments for call in calls)
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"{index} ANSWER:sunny"}
        for index, call in enumerate(calls)
    ]
    answered = echo.responses.create(model="demo", input=results, previous_response_id=found.id, tools=[TOOL])
    assert answered.output_text.startswith('sunny"')
    items = [*asking("none"), *found.output, *results]
    again = echo.responses.create(model="demo", input=[_plain(item) for item in items], tools=[TOOL])
    assert again.output_text.startswith('sunny"')


def _plain(item):
    return item if isinstance(item, dict) else item.model_dump(exclude_none=True)


def test_reasoning_is_an_item_of_its_own(echo):
    asked = asking("<think>first this</think>\n\nthen that")
    found = echo.responses.create(model="demo", input=asked, reasoning={"effort": "high"})
    reasoning, message = found.output
    assert reasoning.type == "reasoning"
    assert reasoning.content[0].text.strip() == "first this"
    assert message.content[0].text.strip() == "then that"
    assert 0 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens
    with echo.responses.stream(model="demo", input=asked) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output_text.strip() == "then that"
    items = [_plain(reasoning), _plain(message), *asking("go on")]
    assert echo.responses.create(model="demo", input=items).output_text == "go on"


def test_an_answer_of_white_space_is_streamed_as_it_is(echo):
    asked = {"model": "demo", "input": "Q ANSWER:\r\nb", "max_output_tokens": 2}
    whole = echo.responses.create(**asked).output_text
    assert whole
    assert not whole.strip()
    with echo.responses.stream(**asked) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole
    assert events[-1].response.output_text == whole


def test_a_broken_call_is_text_in_the_answer(echo):
    asked = asking('<tool_call>{"name": "weather", oh no</tool_call> sorry')
    with echo.responses.stream(model="demo", input=asked, tools=[TOOL]) as stream:
        final = stream.get_final_response()
    assert "sorry" in final.output_text
    assert [item.type for item in final.output] == ["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "item_reference"}]}, "input.0.id"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "input.0.content.0.refusal"),
        ({"input": ""}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
        ({"input": []}, "input"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": "x", "nonsense": 1}, "nonsense"),
        ({"input": "x", "n": 2}, "n"),
    ],
)
def test_what_is_not_there_is_refused_by_its_name(served, body, param):
    found = httpx.post(served.url + "/v1/responses", json={"model": "demo", **body}, timeout=60)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == param


def test_an_empty_input_is_not_called_missing(served):
    for body, said in (({}, "Missing required parameter: 'input'"), ({"input": ""}, "Invalid input: it is empty"),
                       ({"input": []}, "Invalid input: it is empty")):  # fmt: skip
        found = httpx.post(served.url + "/v1/responses", json={"model": "demo", **body}, timeout=60)
        assert found.json()["error"]["message"].startswith(said)


def test_a_part_without_its_text_is_named(served):
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}],
    }
    error = httpx.post(served.url + "/v1/chat/completions", json=body, timeout=60).json()["error"]
    assert error["message"] == "Missing required parameter: 'messages.0.content.1.text'"
    assert error["param"] == "messages.0.content.1.text"


def test_an_item_of_a_stored_answer_may_be_named_by_its_id(echo):
    asked = asking("<think>first this</think>\n\nthen that")
    made = echo.responses.create(model="demo", input=[{"id": "msg_mine", **asked[0]}, *asked[1:]])
    ids = ["msg_mine", *(item.id for item in made.output)]
    assert len(ids) == 3
    references = [{"type": "item_reference", "id": id} for id in ids]
    again = echo.responses.create(model="demo", input=[*references, *asking("go on")])
    whole = [asked[0], *map(_plain, made.output), *asking("go on")]
    assert again.output_text == "go on"
    assert again.usage.input_tokens == echo.responses.create(model="demo", input=whole).usage.input_tokens
    listed = echo.responses.input_items.list(again.id, order="asc")
    assert [item.id for item in listed.data][: len(ids)] == ids, "what was named is kept itself"
    with pytest.raises(openai.BadRequestError, match="Duplicate item found with id"):
        echo.responses.create(model="demo", input=[references[0], references[0]])
    apart = echo.responses.create(model="demo", input=asked, store=False)
    for id in (apart.output[0].id, "msg_none"):
        with pytest.raises(openai.NotFoundError, match=f"Item with id '{id}' not found") as error:
            echo.responses.create(model="demo", input=[*asked, {"type": "item_reference", "id": id}])
        assert error.value.param == f"input.{len(asked)}.id"


def test_items_are_forgotten_with_their_answers():
    store = ResponseStore(max_responses=2)
    for name, ids in (("a", ("1", "2")), ("b", ("2", "3")), ("c", ("4",))):
        store.put(
            StoredResponse({"id": name, "output": [{"id": f"out-{name}"}]}, (), tuple({"id": id} for id in ids), "me")
        )
    assert [store.item(id, "me") is not None for id in ("1", "2", "3", "4", "out-a", "out-b")] == [
        False, True, True, True, False, True
    ]  # fmt: skip
    assert store.item("2", "you") is None
    store.remove("b", "me")
    assert store.item("2", "me") is None
    store.put(StoredResponse({"id": "c", "output": []}, (), (), "me"))
    assert store.item("4", "me") is None, "the answer was replaced"


@pytest.mark.parametrize("value", ["1e999", "-1e999"])
def test_numbers_that_json_cannot_repeat_are_refused(served, value):
    for field in ('"metadata": {"a": %s}', '"tools": [{"type": "function", "name": "f", "parameters": {"a": %s}}]'):
        body = '{"input": "x", "max_output_tokens": 2, %s}' % (field % value)
        found = httpx.post(
            served.url + "/v1/responses", content=body, headers={"content-type": "application/json"}, timeout=60
        )
        assert found.status_code == 400
        assert "not finite" in found.json()["error"]["message"]


def test_a_prompt_that_is_too_long_is_an_error_unless_it_may_be_truncated(served):
    body = {"model": "demo", "input": "fox " * 3000, "max_output_tokens": 4}
    found = httpx.post(served.url + "/v1/responses", json=body, timeout=60)
    assert found.json()["error"]["code"] == "context_length_exceeded"
    found = httpx.post(served.url + "/v1/responses", json={**body, "truncation": "auto"}, timeout=60)
    assert found.status_code == 200
    assert found.json()["usage"]["output_tokens"] == 4


def test_one_client_cannot_continue_the_conversation_of_another():
    with serving(api_keys=("one", "two")) as served:
        clients = [openai.OpenAI(base_url=served.url + "/v1", api_key=key, max_retries=0) for key in ("one", "two")]
        made = clients[0].responses.create(model="demo", input=QUESTION, max_output_tokens=2)
        assert clients[0].responses.retrieve(made.id).id == made.id
        with pytest.raises(openai.NotFoundError):
            clients[1].responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError):
            clients[1].responses.create(model="demo", input="x", previous_response_id=made.id)
        for client in clients:
            client.close()


def test_the_store_counts_everything_that_it_keeps():
    store = ResponseStore(max_bytes=1000)
    for name in "abcde":
        store.put(StoredResponse({"id": name}, (), ({"id": "rs", "encrypted_content": "x" * 300},), "me"))
    assert len(store) == 2
    assert store.find("e", "me") is not None


def test_the_store_takes_no_more_memory_than_it_counts():
    items = tuple(json.loads(json.dumps([{"id": "a", "summary": [{}] * 100_000}])))
    tracemalloc.start()
    try:
        store = ResponseStore(max_bytes=1 << 20)
        for name in "abcdef":
            store.put(StoredResponse({"id": name}, (), json.loads(json.dumps(items)), "me"))
        assert tracemalloc.get_traced_memory()[0] < 2 << 20
        assert len(store) == 3
        assert store.find("f", "me").items == items
    finally:
        tracemalloc.stop()


def test_a_number_that_json_cannot_repeat_is_refused_also_where_no_answer_repeats_it(served):
    item = {"type": "reasoning", "id": "rs", "summary": ["number"]}
    text = json.dumps({"model": "demo", "input": [item, {"role": "user", "content": "a"}], "max_output_tokens": 1})
    found = httpx.post(served.url + "/v1/responses", content=text.replace('"number"', "1e999"), timeout=60)
    assert found.status_code == 400
    assert "not finite" in found.json()["error"]["message"]


def test_the_store_forgets_the_oldest():
    store = ResponseStore(max_responses=3, max_bytes=400)

    def put(name, text="x"):
        store.put(StoredResponse({"id": name}, ({"role": "user", "content": text},), (), "me"))

    for name in "abcd":
        put(name)
    assert store.find("a", "me") is None
    assert len(store) == 3
    assert store.find("b", "me") is not None
    assert store.find("b", "you") is None
    put("e")
    assert store.find("c", "me") is None, "it was used meanwhile"
    assert store.find("b", "me") is not None, "it was used meanwhile"
    put("long", "x" * 300)
    assert len(store) < 3
    assert store.find("long", "me") is not None
    put("too long", "x" * 1000)
    assert len(store) == 0
    with pytest.raises(ApiError, match="not found"):
        store.previous("a", "me")
    put("f")
    store.remove("f", "me")
    assert len(store) == 0
    assert store._num_bytes == 0

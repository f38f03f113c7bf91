"""Tests chats with OpenAI's own client, against the pipeline's answers: whole, streamed, several, with stops and seeds."""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np
import pytest

openai = pytest.importorskip("openai")

QUESTION = [{"role": "user", "content": "What is an NPU?"}]


@pytest.fixture(scope="module")
def answer(served):
    """The answer of the pipeline itself, whose tests compare it with the original model."""
    return served.pipeline().generate(QUESTION, max_new_tokens=40)


def test_an_answer_is_that_of_the_pipeline(client, answer):
    found = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=40)
    assert found.choices[0].message.content == answer.texts[0]
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == str(answer.finish_reasons[0].value)
    assert found.usage.prompt_tokens == answer.perf_metrics.get_num_input_tokens()
    assert found.usage.completion_tokens == len(answer.tokens[0])
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.object == "chat.completion"
    assert found.id.startswith("chatcmpl-")
    assert found.model == "demo"


def test_tokens_of_a_stop_string_are_counted(client, answer):
    """As in OpenAI's API: also where it begins within the first token, so that no token is left of the answer."""
    stop = answer.texts[0][1:3]
    found = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=40, stop=[stop])
    assert found.choices[0].message.content == answer.texts[0][:1]
    assert found.choices[0].finish_reason == "stop"
    assert 1 <= found.usage.completion_tokens <= 3


def test_a_second_turn_is_cached(client):
    conversation = [{"role": "user", "content": "Tell me about a fox. " * 8}]
    first = client.chat.completions.create(model="demo", messages=conversation, max_tokens=8)
    conversation += [first.choices[0].message, {"role": "user", "content": "And then?"}]
    second = client.chat.completions.create(model="demo", messages=conversation, max_tokens=8)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens <= cached < second.usage.prompt_tokens


def test_a_stream_has_the_form_that_clients_expect(served, answer):
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 40, "stream": True}
    with httpx.stream("POST", served.url + "/v1/chat/completions", json=body, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = b"".join(response.iter_raw())
    events = raw.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert first["finish_reason"] is None
    assert "".join(choice["delta"]["content"] for choice in middle) == answer.texts[0]
    assert len(middle) > 5, "it came in pieces"
    assert all(choice["finish_reason"] is None for choice in middle)
    assert last["delta"] == {}
    assert last["finish_reason"] == str(answer.finish_reasons[0].value)


def test_usage_is_a_chunk_of_its_own_if_asked_for(client, answer):
    stream = client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    *others, last = list(stream)
    assert all(chunk.usage is None and chunk.choices for chunk in others)
    assert last.choices == []
    assert last.usage.completion_tokens == len(answer.tokens[0])


def test_the_async_client_reads_many_streams_at_once(served):
    async def read(client, number):
        stream = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": f"Tell me about {number}."}], max_tokens=24, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def read_all():
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(read(client, number) for number in range(12)))

    texts = asyncio.run(read_all())
    for number, text in enumerate(texts):
        alone = served.pipeline().generate([{"role": "user", "content": f"Tell me about {number}."}], max_new_tokens=24)
        assert text == alone.texts[0]


def test_a_stop_string_ends_an_answer_before_it(client, answer):
    stop = answer.texts[0][12:18]
    found = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=40, stop=[stop, "never said"])
    assert found.choices[0].message.content == answer.texts[0][: answer.texts[0].index(stop)]
    assert found.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=40, stop=stop, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == found.choices[0].message.content


def test_a_limit_of_tokens_is_kept(client):
    for name in ("max_tokens", "max_completion_tokens"):
        found = client.chat.completions.create(model="demo", messages=QUESTION, **{name: 3})
        assert found.usage.completion_tokens == 3
        assert found.choices[0].finish_reason == "length"


def test_a_seed_decides_the_answer(served, client):
    def text(seed, **options):
        found = client.chat.completions.create(
            model="demo", messages=QUESTION, max_tokens=24, temperature=1.5, seed=seed, **options
        )
        return [choice.message.content for choice in found.choices]

    assert text(7) == text(7)
    assert len({text(seed)[0] for seed in range(6)}) > 1
    assert text(0) == text(0)
    assert len({text(-3)[0] for _ in range(6)}) > 1, "a negative seed is random"
    direct = served.pipeline().generate(QUESTION, max_new_tokens=24, do_sample=True, temperature=1.5, rng_seed=7).texts
    assert text(7) == direct
    three = text(7, n=3)
    assert three[0] == direct[0]
    assert len(set(three)) > 1


def test_several_answers_are_streamed_by_index(client):
    options = {"model": "demo", "messages": QUESTION, "max_tokens": 24, "temperature": 1.5, "seed": 21, "n": 3}
    whole = client.chat.completions.create(**options)
    texts, reasons = ["", "", ""], [None] * 3
    usage = None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens  # the prompt is counted once


def test_logprobs_are_those_of_the_chosen_tokens(served, client):
    found = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=10, logprobs=True)
    direct = served.pipeline().generate(QUESTION, max_new_tokens=10, logprobs=1)
    entries = found.choices[0].logprobs.content
    assert len(entries) == len(direct.tokens[0])
    assert sum(entry.logprob for entry in entries) == pytest.approx(direct.scores[0], abs=1e-4)
    assert all(entry.logprob <= 0 and entry.top_logprobs == [] for entry in entries)
    streamed = []
    for chunk in client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=10, logprobs=True, stream=True
    ):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert np.allclose([entry.logprob for entry in streamed], [entry.logprob for entry in entries], atol=1e-5)


def test_tokens_that_are_ready_together_are_one_chunk_but_those_with_logprobs_are_not(client, answer):
    options = {"model": "demo", "messages": QUESTION, "max_tokens": 40, "stream": True}
    pieces = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**options)]
    assert "".join(filter(None, pieces)) == answer.texts[0]
    each = [len(chunk.choices[0].logprobs.content) for chunk in client.chat.completions.create(**options, logprobs=True)
            if chunk.choices[0].logprobs]  # fmt: skip
    assert sum(each) == len(answer.tokens[0])
    assert len(each) > sum(map(bool, pieces)), "a token of the embedded model takes a fraction of the least gap"


def test_a_beam_search_is_answered_whole(served, client):
    found = client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=12, n=2, extra_body={"num_beams": 3}
    )
    direct = served.pipeline().generate(QUESTION, max_new_tokens=12, num_beams=3, num_return_sequences=2)
    assert [choice.message.content for choice in found.choices] == direct.texts
    with pytest.raises(openai.BadRequestError, match="num_beams with stream"):
        client.chat.completions.create(
            model="demo", messages=QUESTION, max_tokens=12, stream=True, extra_body={"num_beams": 3}
        )


def test_our_own_fields_reach_the_sampler(served, client):
    extra = {
        "top_k": 5,
        "min_p": 0.05,
        "repeat_penalty": 1.3,
        "typical_p": 0.9,
        "xtc_probability": 0.3,
        "dry_multiplier": 0.8,
    }
    found = client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=24, temperature=0.9, seed=5, extra_body=extra
    )
    renamed = {**extra, "repetition_penalty": extra["repeat_penalty"]}
    del renamed["repeat_penalty"]
    direct = served.pipeline().generate(
        QUESTION, max_new_tokens=24, do_sample=True, temperature=0.9, rng_seed=5, **renamed
    )
    assert found.choices[0].message.content == direct.texts[0]


def test_a_conversation_as_clients_send_it_back(client):
    """Parts of text, the developer's role, and the fields that are null in an answer of OpenAI's client."""
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "an NPU?"}]
    asked = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    first = client.chat.completions.create(model="demo", messages=asked, max_tokens=8)
    plain = [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert client.chat.completions.create(model="demo", messages=plain, max_tokens=8).choices == first.choices
    history = [*asked, first.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
    assert client.chat.completions.create(model="demo", messages=history, max_tokens=4).choices[0].message.content


def test_response_formats_are_satisfied(client):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "legs": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["name", "legs"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}
    found = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=120, response_format=format)
    values = json.loads(found.choices[0].message.content)
    assert set(values) == {"name", "legs"}
    assert 0 <= values["legs"] <= 9
    assert found.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=120, response_format=format, stream=True
    )
    assert json.loads("".join(chunk.choices[0].delta.content or "" for chunk in stream)) == values
    free = client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=2, response_format={"type": "json_object"}
    )
    assert free.choices[0].message.content.startswith("{")

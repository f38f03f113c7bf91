"""Tests the stream of chunks by itself: its form is that of sse-starlette, what is ready together is one message, nothing waits
for what comes later, and a client that takes nothing is cut off."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sse_starlette import ServerSentEvent
from support.quick import examples

from staticllm.server.answers.stream import ChunkStream, EventFrame
from staticllm.server.http.errors import to_json
from staticllm.server.metrics import ServerMetrics
from staticllm.server.ollama.answer import LineStream

DEADLINE = 60
SCOPE = {"type": "http", "method": "POST", "path": "/"}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@settings(max_examples=examples(200), deadline=None)
@given(values, st.none() | st.sampled_from(["response.created", "response.output_text.delta"]))
def test_an_event_is_that_of_the_library(value, name):
    text = to_json(value)
    assert EventFrame.of(name).around(text) == ServerSentEvent(text, event=name, sep="\n").encode()


def test_an_answer_is_one_line_also_for_clients_that_split_as_unicode_does():
    value = {"content": "a\x85b\u2028c\u2029d\x0be\x1cf\né"}
    text = to_json(value)
    assert text.splitlines() == [text]
    assert json.loads(text) == value
    assert "é" in text


class Client:
    """Takes messages, one after another; from the moment ``is_stalled`` is set it takes nothing."""

    def __init__(self):
        self.bodies, self.is_stalled = [], False
        self.arrived = asyncio.Event()

    async def send(self, message):
        if self.is_stalled:
            await asyncio.Event().wait()
        self.bodies.append(message.get("body", b""))
        self.arrived.set()

    async def receive(self):
        await asyncio.Event().wait()

    async def wait_for(self, body):
        while body not in self.bodies:
            self.arrived.clear()
            await asyncio.wait_for(self.arrived.wait(), DEADLINE)


def call_with(send_seconds=DEADLINE, ping_seconds=DEADLINE):
    limits = SimpleNamespace(send_seconds=send_seconds, ping_seconds=ping_seconds)
    return SimpleNamespace(state=SimpleNamespace(settings=limits, metrics=ServerMetrics(list)))


async def run(stream, client):
    await asyncio.wait_for(stream(SCOPE, client.receive, client.send), DEADLINE)


def test_chunks_that_are_ready_together_are_one_message_and_no_chunk_waits_for_the_next():
    async def test():
        client, may_go_on, closed = Client(), asyncio.Event(), []

        async def batches():
            yield [{"text": "a"}]
            await may_go_on.wait()
            yield [{"text": "b"}, {"text": "é\n"}]

        async def close():
            closed.append(True)

        task = asyncio.ensure_future(run(ChunkStream(call_with(), batches(), close), client))
        await client.wait_for(b'data: {"text":"a"}\n\n')  # the next one does not exist yet
        may_go_on.set()
        await task
        together = 'data: {"text":"b"}\n\ndata: {"text":"é\\n"}\n\n'.encode()
        assert client.bodies == [b"", b'data: {"text":"a"}\n\n', together, b"data: [DONE]\n\n", b""]
        assert closed == [True]

    asyncio.run(test())


def test_lines_that_are_ready_together_are_one_message():
    async def test():
        client = Client()

        async def batches():
            yield [{"a": 1}, {"b": 2}]

        await run(LineStream(call_with(), batches(), _nothing), client)
        assert client.bodies == [b"", b'{"a":1}\n{"b":2}\n', b""]

    asyncio.run(test())


async def _nothing():
    pass


@pytest.mark.parametrize("stalls_at", ["first", "later"])
def test_a_client_that_takes_nothing_is_cut_off_also_while_pings_wait(stalls_at):
    async def test():
        client, ended, closed = Client(), asyncio.Event(), []
        client.is_stalled = stalls_at == "first"

        async def batches():
            try:
                for number in range(10**6):
                    client.is_stalled |= number == 3
                    yield [{"text": number}]
            finally:
                ended.set()

        async def close():
            closed.append(True)

        await run(ChunkStream(call_with(send_seconds=0.2, ping_seconds=0.05), batches(), close), client)
        assert closed == [True]
        assert len(client.bodies) == (0 if stalls_at == "first" else 4)
        assert ended.is_set() or stalls_at == "first"

    asyncio.run(test())


def test_a_slow_client_that_takes_each_message_in_time_is_not_cut_off():
    async def test():
        client = Client()
        original = client.send

        async def send(message):
            await asyncio.sleep(0.05)
            await original(message)

        client.send = send

        async def batches():
            for number in range(50):
                yield [{"text": number}]

        await run(ChunkStream(call_with(send_seconds=2), batches(), _nothing), client)
        assert client.bodies[-2:] == [b"data: [DONE]\n\n", b""]

    asyncio.run(test())

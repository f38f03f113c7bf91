"""Tests that a streamed answer which another replica makes again is continued where it was lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

for package in ("starlette", "pydantic"):
    pytest.importorskip(package)

from staticllm.pipelines.daemon_client.delivered import DivergedError  # noqa: E402
from staticllm.server.ray_app.replay import EventReplay, lost_event, seeded  # noqa: E402


def event(chunk):
    return f"data: {json.dumps(chunk)}\n\n".encode()


def answer(pieces, identity="a", reason="stop", field="content"):
    """The events of one answer: its role, pieces of text, the reason for its end, and the mark of the end."""
    deltas = [{"role": "assistant"}, *({field: piece} for piece in pieces)]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": reason})
    return [event({"id": identity, "created": 1, "choices": [each]}) for each in choices] + [b"data: [DONE]\n\n"]


def chunks_of(data):
    events = data.decode().split("\n\n")[:-1]
    assert events.pop() == "data: [DONE]"
    return [json.loads(each.removeprefix("data: ")) for each in events if not each.startswith(":")]


def text_of(chunks, field="content"):
    return "".join(chunk["choices"][0]["delta"].get(field, "") for chunk in chunks)


def cut(text, lengths):
    pieces = []
    for length in lengths:
        pieces.append(text[:length])
        text = text[length:]
    return [piece for piece in [*pieces, text] if piece]


LENGTHS = st.lists(st.integers(1, 5), max_size=8)


@given(
    st.text(max_size=20),
    LENGTHS,
    LENGTHS,
    st.integers(0, 600),
    st.integers(1, 200),
    st.sampled_from(["content", "text"]),
)
def test_a_stream_lost_anywhere_is_continued_exactly_once(text, first, second, lost_after, step, field):
    if field == "text":  # completions have the text in the choice

        def made(lengths, identity):
            deltas = [{"index": 0, "text": piece, "finish_reason": None} for piece in cut(text, lengths)]
            deltas.append({"index": 0, "text": "", "finish_reason": "length"})
            return (
                b"".join(event({"id": identity, "created": 1, "choices": [each]}) for each in deltas)
                + b"data: [DONE]\n\n"
            )
    else:

        def made(lengths, identity):
            return b": ping\n\n" + b"".join(answer(cut(text, lengths), identity))

    replay = EventReplay()
    sent = replay.take(made(first, "one")[:lost_after])
    if not replay.is_complete:
        replay.restart()
        again = made(second, "two")
        sent += b"".join(replay.take(again[start : start + step]) for start in range(0, len(again), step))
    chunks = chunks_of(sent)
    found = "".join(
        each["choices"][0].get("text", each["choices"][0].get("delta", {}).get("content", "")) for each in chunks
    )
    assert found == text
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [each["choices"][0]["finish_reason"] for each in chunks if each["choices"][0]["finish_reason"]] == [
        "length" if field == "text" else "stop"
    ]
    assert sum("role" in each["choices"][0].get("delta", {}) for each in chunks) == (field == "content")


@pytest.mark.parametrize("num_sent", range(1, 6))
def test_usage_and_ends_are_sent_once(num_sent):
    end = {"index": 0, "text": "lo", "finish_reason": "stop"}
    usage = event({"id": "a", "created": 1, "choices": [], "usage": {"total_tokens": 3}})
    parts = [event({"id": "a", "created": 1, "choices": [{**end, "text": "Hel", "finish_reason": None}]})]
    parts += [event({"id": "a", "created": 1, "choices": [end]}), usage, b": ping\n\n", b"data: [DONE]\n\n"]
    replay = EventReplay()
    sent = replay.take(b"".join(parts[:num_sent]))
    if not replay.is_complete:
        replay.restart()
        sent += replay.take(b"".join(parts))
    chunks = chunks_of(sent)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "Hello"
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]].count("stop") == 1
    assert sum("usage" in chunk for chunk in chunks) == 1


def test_what_is_sent_is_never_changed_without_a_loss():
    data = b"".join(answer(["Hello", " there"])) + b": ping\n\n"
    replay = EventReplay()
    assert b"".join(replay.take(bytes([byte])) for byte in data) == data
    assert replay.is_complete


@pytest.mark.parametrize("again", [["Help", "ing"], ["Hel"], [], ["hello"]])
def test_another_answer_is_noticed(again):
    replay = EventReplay()
    replay.take(b"".join(answer(["Hel", "lo"])[:3]))
    replay.restart()
    with pytest.raises(DivergedError):
        replay.take(b"".join(answer(again)))


def test_calls_of_tools_and_errors_are_not_made_again():
    call = {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, "finish_reason": None}
    for chunk in ({"id": "a", "choices": [call]}, {"error": {"message": "no"}}):
        replay = EventReplay()
        assert replay.can_resume
        replay.take(event(chunk))
        assert not replay.can_resume


def test_reasoning_and_content_are_counted_apart():
    first = answer(["think"], field="reasoning_content")[:2] + answer(["an"])[1:2]
    replay = EventReplay()
    sent = replay.take(b"".join(first))
    replay.restart()
    second = answer(["thi", "nk"], "b", field="reasoning_content")[:3] + answer(["ans", "wer"], "b")[1:]
    chunks = chunks_of(sent + replay.take(b"".join(second)))
    assert text_of(chunks, "reasoning_content") == "think"
    assert text_of(chunks) == "answer"


def test_a_stream_gets_a_seed_of_its_own():
    assert seeded({"seed": 0}) == {"seed": 0}
    seeds = {seeded({"stream": True, "seed": None})["seed"] for _ in range(20)}
    assert len(seeds) == 20
    assert seeded({"seed": -1})["seed"] >= 0  # a negative one is random on each replica
    assert seeded({"seed": "a"}) == {"seed": "a"}


def test_a_lost_stream_ends_with_an_error_and_the_mark():
    error, done, rest = lost_event("the machine was lost").decode().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert done == "data: [DONE]"
    assert not rest

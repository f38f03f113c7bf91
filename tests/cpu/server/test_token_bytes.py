"""Log-probabilities have the bytes of every token, also of one that is a part of a character: together those of the answer."""

from __future__ import annotations

import json
import random

import httpx
import openvino_genai as genai
import pytest
from support.server.served import serving

from staticllm import demo_model_path
from staticllm.pipelines.text.output_processor import TextDelta
from staticllm.server.answers.results import Speller
from staticllm.testing import fake_pipeline

NUM_TEXTS = 12
RANGES = ((0x1F300, 0x1F6FF), (0x4E00, 0x4F00), (0x20, 0x7E), (0x300, 0x33F), (0x400, 0x44F), (0x1F1E6, 0x1F1FF))
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    '{# <tool_call>{"name": "f", "arguments": {}}</tool_call> <think> </think> #}'
)


def random_text(seed):
    """Return random characters: emoji and flags, Chinese, ASCII, marks that combine, Cyrillic."""
    drawn = random.Random(seed)
    text = "".join(chr(drawn.randint(*drawn.choice(RANGES))) for _ in range(drawn.randint(1, 24)))
    return f"a{text}\N{ZERO WIDTH JOINER}\N{FOX FACE}."


@pytest.fixture(scope="module")
def client():
    tokenizer = genai.Tokenizer(str(demo_model_path()))
    tokenizer.chat_template = TEMPLATE

    def load(device, properties, on_progress):
        return fake_pipeline(lambda prompt: prompt.rsplit("ANSWER:", 1)[1], tokenizer=tokenizer)

    with serving(pipelines={"demo": load}) as served, httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def events_of(found):
    assert found.status_code == 200, found.text
    lines = [line.removeprefix("data: ") for line in found.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def chat(client, prompt, is_streamed, **more):
    body = {
        **more,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 400,
        "logprobs": True,
        "stream": is_streamed,
    }
    found = client.post("/v1/chat/completions", json=body)
    if is_streamed:
        choices = [chunk["choices"][0] for chunk in events_of(found)]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        return text, [entry["bytes"] for choice in choices for entry in (choice["logprobs"] or {}).get("content", [])]
    choice = found.json()["choices"][0]
    return choice["message"]["content"], [entry["bytes"] for entry in choice["logprobs"]["content"]]


def completion(client, prompt, is_streamed, **more):
    body = {**more, "prompt": prompt, "max_tokens": 400, "logprobs": 0, "stream": is_streamed}
    found = client.post("/v1/completions", json=body)
    choices = [chunk["choices"][0] for chunk in (events_of(found) if is_streamed else [found.json()])]
    text = "".join(choice["text"] for choice in choices)
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    spelled = [each for found in logprobs for each in found["bytes"]]
    tokens = [each for found in logprobs for each in found["tokens"]]
    offsets = [each for found in logprobs for each in found["text_offset"]]
    before = b""
    for token, own, offset in zip(tokens, spelled, offsets, strict=True):
        assert offset == len(before.decode(errors="ignore")), "characters that are whole before the token"
        written = "".join(f"\\x{byte:02x}" for byte in own)
        assert token in (bytes(own).decode(errors="replace"), f"bytes:{written}")
        before += bytes(own)
    return text, spelled


def response(client, prompt, is_streamed, **more):
    body = {
        **more,
        "input": prompt,
        "max_output_tokens": 400,
        "include": ["message.output_text.logprobs"],
        "stream": is_streamed,
    }
    found = client.post("/v1/responses", json=body)
    if is_streamed:
        deltas = [event for event in events_of(found) if event["type"] == "response.output_text.delta"]
        return "".join(each["delta"] for each in deltas), [
            entry["bytes"] for each in deltas for entry in each["logprobs"]
        ]
    parts = [item["content"][0] for item in found.json()["output"] if item["type"] == "message"]
    return "".join(part["text"] for part in parts), [entry["bytes"] for part in parts for entry in part["logprobs"]]


def ollama(client, prompt, is_streamed, **more):
    body = {"options": more, "model": "demo", "messages": [{"role": "user", "content": prompt}]}
    body |= {"logprobs": True, "stream": is_streamed}
    found = client.post("/api/chat", json=body)
    objects = [json.loads(line) for line in found.text.split("\n") if line]
    text = "".join(each["message"]["content"] for each in objects)
    return text, [entry["bytes"] for each in objects for entry in each.get("logprobs", [])]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("answer", [chat, completion, response, ollama])
def test_bytes_of_tokens_make_the_text(client, answer, is_streamed):
    num_parts = 0
    for seed in range(NUM_TEXTS):
        text = random_text(seed)
        found, spelled = answer(client, f"Q ANSWER:{text}", is_streamed)
        assert found == text
        assert b"".join(map(bytes, spelled)) == text.encode()
        num_parts += sum(
            bytes(each).decode(errors="replace") != bytes(each).decode(errors="ignore") for each in spelled
        )
    assert num_parts > NUM_TEXTS, "tokens that are parts of characters"


def test_log_probabilities_of_responses_are_those_of_the_text(client):
    """Neither the reasoning nor its markers have any."""
    prompt = "Q ANSWER:<think>well, 🦊</think>\n\nnaïve 🦊"
    for is_streamed in (False, True):
        text, spelled = response(client, prompt, is_streamed)
        assert text == "naïve 🦊"
        assert b"".join(map(bytes, spelled)) == text.encode()


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
BROKEN = '<tool_call>{"name": "f", "arguments": {"a": 🦊, oh no</tool_call>'
CALLED = [
    (BROKEN, BROKEN),
    (f"See: {CALL}", "See:"),
    (f"See, 🦊: {CALL} {BROKEN} and so", f"See, 🦊:{BROKEN} and so"),
    (f"<think>See: f</think>\n\nSee: f\n{CALL}\n", "See: f"),
    (f"{CALL} {BROKEN[:40]}", BROKEN[:40]),
    (f"{CALL}{BROKEN}{CALL} bye", f"{BROKEN}bye"),
]
"""Answers with calls, and the text beside them."""


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("written", "wanted"), CALLED)
def test_log_probabilities_beside_calls_are_those_of_the_text(client, written, wanted, is_streamed):
    tools = [
        {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    ]
    text, spelled = response(client, f"Q ANSWER:{written}", is_streamed, tools=tools)
    assert "".join(text.split()) == "".join(wanted.split())
    assert "".join(b"".join(map(bytes, spelled)).decode().split()) == "".join(wanted.split())


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("answer", [chat, completion, response, ollama])
def test_bytes_of_tokens_make_the_text_where_a_stop_string_cuts_it(client, answer, is_streamed):
    num_cut = 0
    for seed in range(2 * NUM_TEXTS):
        drawn = random.Random(seed)
        text = "".join(
            drawn.choice(["naïve ", "🦊", "edded ", "wonderful ", "東京", "things, ", "before"]) for _ in range(6)
        )
        place = drawn.randrange(1, len(text))
        stop = text[place : place + drawn.choice([1, 2, 4])]
        wanted = text[: text.find(stop)] if stop.strip() else text
        more = {"stop": stop} if stop.strip() else {}
        found, spelled = answer(client, f"Q ANSWER:{text}", is_streamed, **more)
        assert found.strip() == wanted.strip(), (seed, text, stop)
        assert b"".join(map(bytes, spelled)).decode().strip() == wanted.strip(), (seed, text, stop)
        num_cut += found != text
    assert num_cut > NUM_TEXTS


def test_pieces_of_tokens_that_are_no_text_are_their_bytes(client):
    """As in llama.cpp: a text for whole characters, else a list of numbers."""
    for seed in range(NUM_TEXTS):
        text = random_text(seed)
        found = client.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
        pieces = [each["piece"] for each in found]
        assert any(isinstance(piece, list) for piece in pieces)
        assert b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces) == text.encode()


PIECE_BYTES = [b"", b" ", b" a", b"a", b"b", b" ab", b".", "é".encode(), *(bytes([byte]) for byte in range(256))]


def decode_pieces(ids):
    """Make text of tokens as SentencePiece does: without the space that its first token begins with."""
    joined = b"".join(PIECE_BYTES[id] for id in ids).decode(errors="replace")
    return joined.removeprefix(" ")


def test_tokens_are_spelled_as_their_answers_have_them():
    """Also by vocabularies whose tokens have a space that is left out at the beginning of a text."""
    for seed in range(200):
        drawn = random.Random(seed)
        ids = []
        for _ in range(drawn.randint(1, 120)):
            spelled = chr(drawn.randint(*drawn.choice(RANGES))).encode() if drawn.random() < 0.4 else b""
            ids += [8 + byte for byte in spelled] or [drawn.randrange(8)]
        cut = drawn.randrange(len(ids) + 1)
        deltas = [TextDelta(part, "", logprobs=[0.0] * len(part)) for part in (ids[:cut], ids[cut:])]
        speller = Speller(decode_pieces, PIECE_BYTES)
        found = [token for delta in deltas for token in speller.spell(delta)]
        text = decode_pieces(ids)
        assert b"".join(token.bytes or b"" for token in found) == text.encode(), (seed, text)
        before = b""
        for token in found:
            assert token.offset == len(before.decode(errors="ignore"))
            before += token.bytes or b""


def test_offsets_count_characters_that_were_never_completed():
    """Their places in the text are taken: it has a mark there."""
    for seed in range(300):
        drawn = random.Random(seed)
        ids = [drawn.choice([2, 3, 4, 6, 7, 8 + 0xF0, 8 + 0x9F, 8 + 0x98, 8 + 0x80, 8 + 0xC3]) for _ in range(12)]
        found = Speller(decode_pieces, PIECE_BYTES).spell(TextDelta(ids, "", logprobs=[0.0] * len(ids)))
        text = b"".join(token.bytes for token in found).decode(errors="replace")
        for token in found:
            if token.is_text:
                assert text[token.offset :].startswith(token.text), (seed, text, token)

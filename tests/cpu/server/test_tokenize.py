"""Tests `/tokenize` and `/detokenize`: what they return, and that long texts hold up no other client."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.attach.daemons import wait_for
from support.server.served import serving

SECONDS = 60
CLIENT = httpx.Client(timeout=SECONDS, verify=False, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
CHAT, PROMPT = "/v1/chat/completions", "A fox lives in a wood, and so do four others."
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@pytest.fixture
def tokenizer(served):
    return served.pipeline().get_tokenizer()


def test_texts_become_tokens_and_texts_again(served, tokenizer):
    with_special, plain = (
        tokenizer.encode(PROMPT, add_special_tokens=adds).input_ids.data[0].tolist() for adds in (True, False)
    )
    for body, ids in (
        ({"content": PROMPT, "parse_special": True}, plain),
        ({"content": PROMPT, "add_special": True}, with_special),
        ({"prompt": PROMPT}, with_special),
        ({"prompt": PROMPT, "add_special": False}, plain),
    ):
        found = CLIENT.post(served.url + "/tokenize", json=body).json()
        assert found["tokens"] == ids
        assert found["count"] == len(ids)
    back = CLIENT.post(served.url + "/detokenize", json={"tokens": plain}).json()["content"]
    assert back == tokenizer.decode(plain)
    assert CLIENT.post(served.url + "/detokenize", json={"tokens": [10**9]}).status_code == 400
    assert CLIENT.post(served.url + "/tokenize", json={"content": "a", "prompt": "b"}).status_code == 400


def test_pieces_of_a_long_text_leave_room_for_others_and_end_with_their_client(monkeypatch):
    """With one thread, and every token decoded in the time of a whole text, another client is answered meanwhile."""
    with serving(num_threads=1) as served:
        monkeypatch.setattr("staticllm.server.openai.tokens.DECODED", 1)
        tokenizer, decoded = served.pipeline().get_tokenizer(), []

        class Slow:
            encode = tokenizer.encode

            def decode(self, ids):
                decoded.append(ids)
                time.sleep(0.05)
                return tokenizer.decode(ids)

        monkeypatch.setattr(served.pipeline(), "get_tokenizer", Slow)
        body = {"content": tokenizer.decode(list(range(300, 1500))), "with_pieces": True}
        with httpx.Client(timeout=SECONDS) as client, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.post, served.url + "/tokenize", json=body, timeout=1.5)
            wait_for(lambda: decoded, SECONDS)
            assert CLIENT.post(served.url + CHAT, json=HELLO).status_code == 200
            assert not asked.done()
            with pytest.raises(httpx.ReadTimeout):
                asked.result()
        served.wait_until_idle()
        num_decoded = len(decoded)
        time.sleep(0.3)
        assert len(decoded) <= num_decoded + 1


def test_a_text_of_many_tokens_is_written_in_parts(served, tokenizer, monkeypatch):
    monkeypatch.setattr("staticllm.server.openai.tokens.SLICE", 3)
    monkeypatch.setattr("staticllm.server.openai.tokens.DECODED", 2)
    ids = tokenizer.encode(PROMPT).input_ids.data[0].tolist()
    found = CLIENT.post(served.url + "/tokenize", json={"prompt": PROMPT}).json()
    assert found["tokens"] == ids
    assert found["count"] == len(ids) > 3
    found = CLIENT.post(served.url + "/tokenize", json={"prompt": PROMPT, "with_pieces": True}).json()
    assert found["tokens"] == [{"id": token, "piece": tokenizer.decode([token])} for token in ids]
    refused = CLIENT.post(served.url + "/tokenize", json={"content": "a " * (3 << 20)})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "text_too_long"

"""Clients that need an environment of their own: OpenAI's from 3.57 on, Anthropic's, TypeSafe's, and its conformance suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.server.served import serving

S = "Parcel 88 arrived broken. Please send a new one, I leave on Friday."
P = {"type": "predicate", "name": "broken", "instructions": "The parcel arrived damaged."}
C = {
    "type": "choice",
    "name": "desk",
    "instructions": "Which desk takes this?",
    "choices": [{"value": "money", "description": "refunds"}, {"value": "parcels"}, {"value": True}],
}
L = {"type": "score", "instructions": "How urgent is it?", "levels": [{"label": "can wait"}, {"label": "today"}]}
KEY = "secret"


@pytest.fixture(scope="module")
def locked():
    with serving(api_keys=(KEY,)) as served:
        yield served


@pytest.fixture(scope="module")
def openai_client(locked):
    openai = pytest.importorskip("openai", minversion="3.57")
    with openai.OpenAI(base_url=locked.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_openai_asks_and_is_refused(openai_client):
    import openai

    found = openai_client.decisions.create(model="demo", input=S, questions=[P, C, L])
    assert [answer.type for answer in found.answers] == ["predicate", "choice", "score"]
    assert [each.value for each in found.answers[1].probabilities] == ["money", "parcels", True]
    again = openai_client.decisions.create(model="demo", input=S, questions=[L, C, P])
    assert again.answers[::-1] == found.answers
    assert again.usage.input_tokens_details.cached_tokens > 0
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.decisions.create(model="demo", input=S, questions=[P, {**C, "choices": C["choices"][:1]}])
    assert caught.value.param == "questions.1.choices"


def test_the_tool_runner_of_openai_acts(openai_client):
    from openai.lib.decisions_tool_runner import DecisionsToolRunner

    acts = []
    candidates = [
        {"id": "look", "description": "look at the parcel", "execute": lambda: acts.append("look")},
        {"id": "stop", "description": "nothing is left to do", "done": True},
    ]
    runner = DecisionsToolRunner(observe=lambda: f"looked {len(acts)} times", candidates=lambda observation: candidates)
    try:
        found = runner.run(openai_client, {"model": "demo", "input": "Find out what is in the parcel."}, max_steps=3)
        assert found["status"] == "unverified"
    except RuntimeError as error:  # a small model may look for ever
        assert "max_steps" in str(error)
    assert set(acts) <= {"look"}


def test_anthropic_reads_messages_streams_and_tools(locked):
    anthropic = pytest.importorskip("anthropic")
    tools = [
        {
            "name": "find",
            "description": "finds",
            "input_schema": {"type": "object", "properties": {"what": {"type": "string"}}},
        }
    ]
    asked = [{"role": "user", "content": "Tell me a story about a fox."}]
    with anthropic.Anthropic(base_url=locked.url, api_key=KEY, max_retries=0) as client:
        found = client.messages.create(model="demo", max_tokens=20, system="Be brief.", messages=asked)
        assert found.stop_reason == "max_tokens" and found.content[0].text
        with client.messages.stream(model="demo", max_tokens=20, system="Be brief.", messages=asked) as stream:
            assert "".join(stream.text_stream) == found.content[0].text
            assert stream.get_final_message().usage.output_tokens == found.usage.output_tokens
        assert client.messages.count_tokens(model="demo", messages=asked).input_tokens > 5
        called = client.messages.create(
            model="demo", max_tokens=60, tools=tools, tool_choice={"type": "any"}, messages=asked
        )
        assert called.stop_reason == "tool_use" and called.content[-1].name == "find"
        result = {"type": "tool_result", "tool_use_id": called.content[-1].id, "content": "a fox"}
        talk = [*asked, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(model="demo", max_tokens=10, tools=tools, messages=talk).content
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="nobody", max_tokens=10, messages=asked)
    wrong = anthropic.Anthropic(base_url=locked.url, api_key="wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(model="demo", max_tokens=10, messages=asked)


def test_typesafe_asks_with_long_bodies_and_lists_models(locked):
    typesafe = pytest.importorskip("typesafe_sdk")
    questions = {
        "broken": typesafe.Noul(instructions="The parcel is broken."),
        "desk": typesafe.Choice(instructions="Which desk?", criteria={"money": "refunds", "parcels": None}),
        "heat": typesafe.Score(instructions="How urgent?", criteria=["can wait", "today"]),
    }
    with typesafe.TypeSafeClient(api_key=KEY, base_url=locked.url) as client:
        found = client.system_one(state=S * 40, questions=questions)  # longer than 1024 bytes, so in zstd
        assert found.choices["desk"].choice in ("money", "parcels")
        assert [model.name for model in client.models.list().models] == ["demo"]


@pytest.mark.parametrize("has_key", [False, True])
def test_the_suite_of_typesafe_finds_it_conformant(has_key):
    pytest.importorskip("jevcompat")
    suite = Path(sys.executable).with_name("jevcompat.exe" if sys.platform == "win32" else "jevcompat")
    with serving(api_keys=(KEY,) if has_key else ()) as served:
        command = [suite, "test", served.url, *(("--key", KEY) if has_key else ())]
        found = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=300, check=False)
    assert found.returncode == 0, found.stdout[-3000:]

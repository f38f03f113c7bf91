"""Tests that answers with a grammar end within ``max_new_tokens``, from the options of a program and over HTTP to the daemon."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from openvino_genai import StructuredOutputConfig as Soc
from support.server.served import serving

from staticllm import GenerationConfigError, StaticLLMPipeline, demo_model_path
from staticllm.server.models.served import demo_spec
from tests.support.attach.daemons import daemon_thread
from tests.support.helpers import EXACT, assert_nothing_held

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

pytestmark = pytest.mark.usefixtures("shared_programs")
LENGTHS = {"MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 128}
DRAWN = {"do_sample": True, "temperature": 1.0, "apply_chat_template": False}
ENDLESS = {"type": "object", "properties": {"n": {"type": "integer"}, "text": {"type": "string"}}, "required": ["n"]}
LIST = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"$ref": "#"}, ENDLESS]}, "minItems": 1}
CALL = Soc.Tag(begin="<f>", content=Soc.JSONSchema(json.dumps(ENDLESS)), end="</f>")
ASKED = {
    "schema": ({"json_schema": ENDLESS}, lambda text: jsonschema.validate(json.loads(text), ENDLESS)),
    "list": ({"json_schema": LIST}, lambda text: jsonschema.validate(json.loads(text), LIST)),
    "regex": ({"regex": "[a-z ]{3,900}[.!]"}, lambda text: re.fullmatch("[a-z ]{3,900}[.!]", text)[0]),
    "ebnf": (
        {"grammar": 'root ::= "(" root ")" root | [0-9]+ ";"'},
        lambda text: re.fullmatch(r"[0-9();]*[0-9];\)*", text)[0],
    ),
    "tag": (
        {"grammar": CALL},
        lambda text: jsonschema.validate(json.loads(text.removeprefix("<f>").removesuffix("</f>")), ENDLESS),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def pipe():
    with StaticLLMPipeline(demo_model_path(), "CPU", MAX_NUM_SEQS=4, **LENGTHS, **EXACT) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def random_pipe(model_path):
    """A model with random weights, which never ends an answer by itself."""
    with StaticLLMPipeline(model_path("llama"), "CPU", MAX_NUM_SEQS=4, **LENGTHS, **EXACT) as pipe:
        yield pipe


def check_answers(pipe, count):
    """Ask for ``count`` answers of each kind, with 16 to 64 tokens and several at a time."""
    for name, (options, check) in ASKED.items():
        for first in range(0, count, 8):
            lengths = [16 + (first + index) * 11 % 49 for index in range(8)]
            handles = [
                pipe.submit("Write.", rng_seed=1 + first + index, max_new_tokens=length + 8 * (name == "tag"), **options, **DRAWN)
                for index, length in enumerate(lengths)
            ]  # fmt: skip
            for handle in handles:
                result = handle.result()
                assert [str(reason) for reason in result.finish_reasons] == ["stop"], (name, str(result))
                check(str(result))
    assert_nothing_held(pipe)


def test_answers_end_within_their_tokens(pipe):
    check_answers(pipe, 8)


@pytest.mark.slow
def test_hundreds_of_answers_of_a_random_model_end_within_their_tokens(random_pipe):
    check_answers(random_pipe, 96)  # each length of 16 to 64 tokens for each kind


def test_with_the_option_off_answers_are_cut_off(pipe):
    found = [
        pipe.generate("Write.", regex="[a-z ]{3,900}[.!]", max_new_tokens=12, rng_seed=seed, finish_grammar=0, **DRAWN)
        for seed in range(1, 5)
    ]
    cut = [str(answer) for answer in found if answer.finish_reasons == ["length"]]
    assert len(cut) >= 2
    assert not all(re.fullmatch("[a-z ]{3,900}[.!]", text) for text in cut)
    with pytest.raises(GenerationConfigError, match="finish_grammar=2: must be a whole number from 0 to 1"):
        pipe.generate("Write.", regex="a", finish_grammar=2)


def test_drafts_and_beams_end_within_their_tokens_too(pipe):
    for options in ({"max_ngram_size": 3}, {"num_beams": 3}, {"num_beams": 3, "finish_grammar": 1}):
        answer = pipe.generate("abc abc abc", json_schema=LIST, max_new_tokens=20, **options)
        assert answer.finish_reasons == ["stop"], str(answer)
        jsonschema.validate(json.loads(str(answer)), LIST)
    cut = pipe.generate("abc", regex="[a-z]{90}", max_new_tokens=20, num_beams=3, finish_grammar=0)
    assert cut.finish_reasons == ["length"]


def test_the_length_of_the_conversation_is_a_limit_too(pipe):
    """Without ``max_new_tokens``, an answer has what the prompt leaves of the context."""
    for seed in range(1, 4):
        answer = pipe.generate("Write." * 8, regex="[a-z ]{3,9000}[.!]", rng_seed=seed, max_length=100, **DRAWN)
        assert answer.finish_reasons == ["stop"]
        answer = pipe.generate("Write." * 8, regex="[a-z ]{3,9000}[.!]", rng_seed=seed, **DRAWN)
        assert answer.finish_reasons == ["stop"]


def test_the_daemon_keeps_the_rule(monkeypatch, tmp_path, pipe):
    asked = {"json_schema": LIST, "max_new_tokens": 24, "rng_seed": 3, **DRAWN}
    with (
        daemon_thread(monkeypatch, tmp_path / "run"),
        StaticLLMPipeline(demo_model_path(), "CPU", MAX_NUM_SEQS=4, **LENGTHS, **EXACT, daemon=True) as remote,
    ):
        assert remote.generate("Write.", **asked) == pipe.generate("Write.", **asked)
        for off in (0, 1):
            ends = [each.generate("Write.", finish_grammar=off, **asked).finish_reasons for each in (remote, pipe)]
            assert ends == [["stop"] if off else ["length"]] * 2


@pytest.fixture(scope="module")
def server():
    with serving([demo_spec()]) as served:
        yield served


def chat(url, **more):
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": LIST}}
    body = {"model": "demo", "messages": [{"role": "user", "content": "Write."}], "response_format": format, **more}
    (choice,) = httpx.post(f"{url}/v1/chat/completions", json={**body, "max_tokens": 24}, timeout=120).json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


def responses(url, **more):
    format = {"type": "json_schema", "name": "x", "schema": LIST}
    body = {"model": "demo", "input": "Write.", "text": {"format": format}, "max_output_tokens": 24, **more}
    found = httpx.post(f"{url}/v1/responses", json=body, timeout=120).json()
    return found["output"][0]["content"][0]["text"], "stop" if found["status"] == "completed" else "length"


def ollama(url, **more):
    body = {"model": "demo", "messages": [{"role": "user", "content": "Write."}], "format": LIST, "stream": False}
    found = httpx.post(f"{url}/api/chat", json={**body, "options": {"num_predict": 24, **more}}, timeout=120).json()
    return found["message"]["content"], found["done_reason"]


@pytest.mark.parametrize("ask", [chat, responses, ollama])
def test_every_api_ends_answers_in_time_and_has_the_option(server, ask):
    for seed in (1, 2, 3):
        text, reason = ask(server.url, temperature=1.5, seed=seed)
        assert reason == "stop"
        jsonschema.validate(json.loads(text), LIST)
    ends = [ask(server.url, temperature=1.5, seed=seed, finish_grammar=0)[1] for seed in (1, 2, 3)]
    assert "length" in ends

"""Tests the system message and the sampling that a TOML file gives a model: requests have them unless they say others."""

from __future__ import annotations

import httpx
import pytest
from support.server.served import serving

from staticllm.errors import ConfigError, StaticLLMError
from staticllm.server.config_file import read_config_file
from staticllm.server.models.served import demo_spec

SYSTEM = {"role": "system", "content": "Answer in one sentence."}
USER = {"role": "user", "content": "Hi"}
OWN = {"role": "system", "content": "Answer at length."}
SAMPLING = {"do_sample": True, "temperature": 0.3, "repetition_penalty": 1.2}
FILE = """
[[models]]
path = {path!r}
name = "terse"
system = "Answer in one sentence."
sampling = {{ temperature = 0.3, repetition_penalty = 1.2 }}

[[models]]
path = {path!r}
name = "plain"
"""


def specs_of(folder, text):
    file = folder / "models.toml"
    file.write_text(text.replace("{path!r}", repr(str(demo_spec().path))).replace("{{", "{").replace("}}", "}"))
    return [entry.spec() for entry in read_config_file(str(file)).models]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(specs_of(tmp_path_factory.mktemp("served"), FILE)) as found:
        yield found


@pytest.fixture
def asked(served, monkeypatch):
    """A function that posts a request, and returns the prompt and the options of what the model was asked for."""

    def asked(path, body, model="terse"):
        httpx.post(served.url + "/v1/completions", json={"model": model, "prompt": "a", "max_tokens": 1}, timeout=60)
        pipe, taken = served.pipeline(model), []
        submit = pipe.submit

        def noting(prompt, **options):
            taken.append((prompt, options))
            return submit(prompt, **options)

        with monkeypatch.context() as patch:
            patch.setattr(
                pipe,
                "submit",
                lambda prompt, **options: (taken.append((prompt, options)), submit(prompt, **options))[1],
            )
            answer = httpx.post(served.url + path, json={"model": model, "stream": False, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        return taken

    return asked


CONVERSATIONS = [
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 2}, [USER]),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}, [USER]),
    ("/api/chat", {"messages": [USER], "options": {"num_predict": 2}}, [USER]),
    ("/api/generate", {"prompt": "Hi", "options": {"num_predict": 2}}, [USER]),
]


def contents(prompt):
    return [(message["role"], message["content"]) for message in prompt]


@pytest.mark.parametrize(("path", "body", "messages"), CONVERSATIONS)
def test_a_conversation_has_what_the_model_has(path, body, messages, asked):
    ((prompt, options),) = asked(path, body)
    assert contents(prompt) == contents([SYSTEM, *messages])
    assert options.items() >= SAMPLING.items()
    ((prompt, options),) = asked(path, body, "plain")
    assert contents(prompt) == contents(messages)
    assert SAMPLING.keys().isdisjoint(options)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [OWN, USER], "max_tokens": 2, "temperature": 0}),
        ("/v1/chat/completions", {"messages": [{**OWN, "role": "developer"}, USER], "max_tokens": 2, "temperature": 0}),
        ("/v1/responses", {"input": "Hi", "instructions": OWN["content"], "max_output_tokens": 16, "temperature": 0}),
        ("/api/chat", {"messages": [OWN, USER], "options": {"num_predict": 2, "temperature": 0}}),
        ("/api/generate", {"prompt": "Hi", "system": OWN["content"], "options": {"num_predict": 2, "temperature": 0}}),
    ],
)
def test_what_a_request_says_wins(path, body, asked):
    ((prompt, options),) = asked(path, body)
    assert [text for _, text in contents(prompt)] == [OWN["content"], "Hi"]
    assert options["do_sample"] is False
    assert options["repetition_penalty"] == 1.2


def test_a_text_without_template_has_sampling_only(asked):
    ((prompt, options),) = asked("/v1/completions", {"prompt": "Hi", "max_tokens": 2, "temperature": 0.9})
    assert prompt == "Hi"
    assert options["temperature"] == 0.9
    assert options["repetition_penalty"] == 1.2
    ((prompt, _),) = asked("/api/generate", {"prompt": "Hi", "raw": True, "options": {"num_predict": 2}})
    assert prompt == "Hi"


def test_several_answers_share_a_prompt_and_a_beam_search_has_what_it_can(asked):
    body = {"messages": [USER], "max_tokens": 2}
    first, second = asked("/v1/chat/completions", {**body, "n": 2})
    assert first[0] is second[0]
    ((prompt, options),) = asked("/v1/chat/completions", {**body, "num_beams": 2})
    assert contents(prompt) == contents([SYSTEM, USER])
    assert "repetition_penalty" not in options


def test_prompts_are_counted_with_the_system_message_and_it_is_shown(served):
    counts = [
        httpx.post(served.url + "/tokenize", json={"model": name, "messages": messages}).json()["count"]
        for name, messages in (("terse", [USER]), ("plain", [SYSTEM, USER]), ("plain", [USER]))
    ]
    assert counts[0] == counts[1] > counts[2]
    shown = httpx.post(served.url + "/api/show", json={"model": "terse"}).json()
    assert shown["system"] == SYSTEM["content"]
    assert "temperature 0.3" in shown["parameters"]
    assert "system" not in httpx.post(served.url + "/api/show", json={"model": "plain"}).json()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sampling = { temprature = 1 }", "did you mean 'temperature'"),
        ("sampling = { temperature = -1 }", "sampling.temperature=-1: must be a number from 0"),
        ("sampling = { temperature = 'hot' }", "sampling.temperature='hot'"),
        ("sampling = { top_k = 1.5 }", "sampling.top_k=1.5"),
        ("sampling = { seed = 3 }", "unknown option sampling.'seed'"),
        ("system = ''", "system"),
        ("system = 3", "system"),
    ],
)
def test_what_a_model_cannot_have_is_a_line(line, words, tmp_path):
    with pytest.raises(StaticLLMError) as caught:
        specs_of(tmp_path, f"[[models]]\npath = {{path!r}}\n{line}\n")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_chat_models_have_them(tmp_path, tmp_path_factory):
    from support.encoders.encoder_directories import a_directory

    place = a_directory(tmp_path_factory.mktemp("embedder"))
    file = tmp_path / "models.toml"
    file.write_text(f"[[models]]\npath = {str(place)!r}\nsystem = 'x'\n")
    (entry,) = read_config_file(str(file)).models
    with pytest.raises(ConfigError, match=r"system of .*no chat model"):
        entry.spec()


@pytest.mark.parametrize(("value", "greedy"), [(0, True), (0.5, False)])
def test_no_temperature_is_greedy(value, greedy, tmp_path):
    (spec,) = specs_of(tmp_path, f"[[models]]\npath = {{path!r}}\nsampling = {{{{ temperature = {value} }}}}\n")
    assert spec.sampling == ({"do_sample": False} if greedy else {"do_sample": True, "temperature": value})

"""Tests transcriptions and translations over HTTP, with OpenAI's client and by hand, against the pipeline itself."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from support.models.whisper_directory import AS_GENAI, RATE, sound, wav, write_whisper
from support.server.served import serving

from staticllm.errors import ConfigError
from staticllm.pipelines.speech.whisper_config import FALL_BACK
from staticllm.server.models.served import demo_spec, model_spec
from staticllm.server.openai.speech import TranscriptionRequest, TranslationRequest

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.usefixtures("shared_programs")
for package in ("python_multipart", "soundfile", "soxr"):
    pytest.importorskip(package)
ANSWER_SECONDS = 60
DOCS = Path(__file__).parents[3] / "docs" / "server.md"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def served(directory, tmp_path_factory):
    english = write_whisper(tmp_path_factory.mktemp("english"), seed=5, is_multilingual=False)
    with_words = replace(model_spec(f"english={english}"), properties={**AS_GENAI, "WORD_TIMESTAMPS": "YES"})
    specs = [demo_spec(), replace(model_spec(f"whisper={directory}"), properties=AS_GENAI), with_words]
    assert [spec.kind for spec in specs] == ["chat", "speech", "speech"]
    with serving(specs, max_audio=60.0, max_upload=4 << 20) as served:
        post(served)
        yield served


@pytest.fixture(scope="module")
def pipe(served):
    return served.pipeline("whisper")


def recording(seconds, seed=0):
    return wav(sound(seconds, seed), subtype="FLOAT")


def post(served, content=None, path="/v1/audio/transcriptions", name="a.wav", headers=None, **fields):
    files = {"file": (name, recording(0.8) if content is None else content)}
    return httpx.post(
        served.url + path, files=files, data={"model": "whisper", **fields}, headers=headers, timeout=ANSWER_SECONDS
    )


FIELDS = (
    "language",
    "prompt",
    "response_format",
    "temperature",
    "stream",
    "service_tier",
    "model",
    "timestamp_granularities[]",
)


@pytest.mark.parametrize("fields", [*((name,) for name in FIELDS), FIELDS])
def test_an_empty_field_of_a_form_counts_as_absent(served, fields):
    """A form has no other way to say so, and clients send all fields that they have."""
    found = post(served, **dict.fromkeys(fields, ""))
    assert found.status_code == 200, found.text
    assert found.json() == post(served).json()
    assert post(served, path="/v1/audio/translations", **dict.fromkeys(fields, "")).status_code == 200


def wait_until_idle(served, name="whisper"):
    model = served.state.hub.models[name]
    until = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < until:
        left = (model.num_users, *(each.num_running + each.num_waiting for each in model.admissions))
        if not any(left) and model.pipeline.engine.is_idle:
            bank = model.pipeline.engine.runner.cache.cross
            assert bank.num_free == model.pipeline.num_windows
            return
        time.sleep(0.01)
    raise AssertionError(f"something is left: {left}")


def test_a_recording_becomes_text(client, pipe):
    found = client.audio.transcriptions.create(model="whisper", file=("a.wav", recording(0.8)))
    assert found.text == str(pipe.generate(sound(0.8))).strip()
    assert found.text
    assert (found.usage.type, found.usage.seconds) == ("duration", 0.8)


def test_a_recording_is_translated(client, pipe):
    found = client.audio.translations.create(model="whisper", file=("a.wav", recording(0.8)))
    assert found.text == str(pipe.generate(sound(0.8), task="translate")).strip()
    assert found.text != str(pipe.generate(sound(0.8))).strip()


def test_options_reach_the_model(client, pipe):
    options = {"language": "de", "prompt": "The fox went to the river"}
    found = client.audio.transcriptions.create(model="whisper", file=("a.wav", recording(0.8)), **options)
    expected = pipe.generate(sound(0.8), language="de", initial_prompt=options["prompt"])
    assert found.text == str(expected).strip()
    assert found.text != str(pipe.generate(sound(0.8), language="de")).strip()


def test_a_temperature_draws_tokens(served, pipe):
    plain = post(served).json()["text"]
    assert any(post(served, temperature="1").json()["text"] != plain for _ in range(3))
    assert post(served, temperature="0").json()["text"] == plain


def test_segments_have_times(client, pipe):
    found = client.audio.transcriptions.create(
        model="whisper", file=("a.wav", recording(2.5)), response_format="verbose_json",
        timestamp_granularities=["segment"], language="en",
    )  # fmt: skip
    windows = []
    handle = pipe.submit(sound(2.5), on_window=windows.append, return_timestamps=True, language="en")
    expected = handle.result(ANSWER_SECONDS)
    assert (found.text, found.language, found.duration) == (str(expected).strip(), "en", 2.5)
    assert [(each.start, each.text) for each in found.segments] == [
        (round(chunk.start_ts, 3), chunk.text) for chunk in expected.chunks
    ]
    ends = [
        round(window.seconds if segment.end is None else segment.end, 3)
        for window in windows
        for segment in window.segments
    ]
    assert [each.end for each in found.segments] == ends
    assert len(ends) > 1
    for segment in found.segments:
        assert pipe.decode(segment.tokens) == segment.text
        assert segment.avg_logprob < 0
        assert segment.seek / 100 <= segment.start + 1e-6


@pytest.mark.parametrize("granularities", [["word"], ["word", "segment"]])
def test_words_have_times_if_the_model_was_loaded_with_them(client, served, granularities):
    found = client.audio.transcriptions.create(
        model="english", file=("a.wav", recording(2.5)), response_format="verbose_json", language="en",
        timestamp_granularities=granularities,
    )  # fmt: skip
    expected = served.pipeline("english").generate(sound(2.5), return_timestamps=True, word_timestamps=True)
    assert found.text == str(expected).strip()
    assert [(each.word, each.start, each.end) for each in found.words] == [
        (word.word.strip(), round(word.start_ts, 3), round(word.end_ts, 3)) for word in expected.words
    ]
    assert len(found.words) > 1
    assert (found.segments is not None) == ("segment" in granularities)


def test_forms_of_text(served, pipe):
    chunks = pipe.generate(sound(2.5), return_timestamps=True).chunks
    lines = [" ".join(chunk.text.split()) for chunk in chunks if chunk.text.split()]
    assert post(served, recording(2.5), response_format="text").text == str(pipe.generate(sound(2.5))).strip() + "\n"
    srt = post(served, recording(2.5), response_format="srt")
    assert srt.headers["content-type"].startswith("text/plain")
    blocks = srt.text.removesuffix("\n").split("\n\n")
    assert [block.split("\n")[0] for block in blocks] == [str(number + 1) for number in range(len(lines))]
    assert [block.split("\n")[2] for block in blocks] == [line.replace("-->", "->") for line in lines]
    vtt = post(served, recording(2.5), response_format="vtt").text
    assert vtt.startswith("WEBVTT\n\n00:00:0")
    assert vtt.count(" --> ") == len(lines)


@pytest.mark.parametrize("seconds", [0.8, 3.2])
def test_a_stream_has_the_text_as_it_comes(client, pipe, seconds):
    stream = client.audio.transcriptions.create(model="whisper", file=("a.wav", recording(seconds)), stream=True)
    events = list(stream)
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert [event.type for event in events] == ["transcript.text.delta"] * len(deltas) + ["transcript.text.done"]
    assert len(deltas) > 1
    assert "".join(deltas).strip() == events[-1].text == str(pipe.generate(sound(seconds))).strip()


def test_recordings_of_several_clients_are_heard_together(served, pipe):
    expected = {seed: str(pipe.generate(sound(2.2, seed))).strip() for seed in range(8)}
    found = {}

    def ask(seed):
        found[seed] = post(served, recording(2.2, seed)).json()["text"]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    assert len(set(found.values())) == len(found)


def test_an_english_model_is_asked_in_english_only(served):
    plain = post(served, model="english").json()["text"]
    assert post(served, model="english", language="en").json()["text"] == plain
    refused = post(served, model="english", language="de")
    assert refused.status_code == 400
    assert "English only" in refused.json()["error"]["message"]
    assert post(served, model="english", path="/v1/audio/translations").status_code == 400


def test_models_are_listed(served, client):
    kinds = {model.id: model.type for model in client.models.list()}
    assert kinds == {"demo": "chat", "whisper": "speech", "english": "speech"}
    tags = httpx.get(served.url + "/api/tags", timeout=ANSWER_SECONDS).json()["models"]
    sizes = {tag["name"]: tag["size"] for tag in tags}
    files = ("openvino_encoder_model.bin", "openvino_decoder_model.bin")
    folder = served.state.hub.models["whisper"].spec.path
    assert sizes["whisper:latest"] == sum((folder / name).stat().st_size for name in files)
    shown = httpx.post(served.url + "/api/show", json={"model": "whisper"}, timeout=ANSWER_SECONDS).json()
    assert shown["capabilities"] == ["transcription"]
    assert httpx.get(served.url + "/api/scheduler", timeout=ANSWER_SECONDS).status_code == 200


def test_other_endpoints_refuse_a_speech_model(served, client):
    with pytest.raises(openai.BadRequestError, match="'whisper' is a speech model, this endpoint needs a chat model"):
        client.chat.completions.create(model="whisper", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError, match="this endpoint needs an embedding model"):
        client.embeddings.create(model="whisper", input="Hi")
    refused = post(served, model="demo")
    assert "'demo' is a chat model, this endpoint needs a speech model" in refused.json()["error"]["message"]
    assert post(served, model="none").status_code == 404


def test_without_a_name_the_first_speech_model_answers(served):
    answer = httpx.post(
        served.url + "/v1/audio/transcriptions", files={"file": ("a.wav", recording(0.8))}, timeout=ANSWER_SECONDS
    )
    assert answer.json()["text"] == post(served).json()["text"]


BAD_FIELDS = {
    "word": (
        {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
        "serve it with -p whisper:WORD_TIMESTAMPS=YES",
    ),
    "word without times": ({"timestamp_granularities[]": "word"}, "verbose_json"),
    "granularity without times": ({"timestamp_granularities[]": "segment"}, "verbose_json"),
    "unknown granularity": ({"timestamp_granularities[]": "line", "response_format": "verbose_json"}, "segment"),
    "format": ({"response_format": "docx"}, "response_format"),
    "stream of subtitles": ({"response_format": "srt", "stream": "true"}, "stream"),
    "temperature": ({"temperature": "7"}, "temperature"),
    "text as temperature": ({"temperature": "warm"}, "temperature"),
    "language": ({"language": "klingon"}, "klingon"),
    "unknown field": ({"beams": "4"}, "Unknown parameter: 'beams'"),
    "tier": ({"service_tier": "gold"}, "service_tier"),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_bad_field_gets_one_line(served, name):
    fields, part = BAD_FIELDS[name]
    answer = post(served, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert part in error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


BAD_FILES = {
    "text": b"This is a text, and no recording at all.",
    "truncated": wav(sound(1.0))[:30],
    "one sample": wav(np.zeros(1, np.float32)),
    "NaN": wav(np.full(RATE, np.nan, np.float32), subtype="FLOAT"),
    "nothing": b"",
    "zip": b"PK\3\4" + bytes(1000),
    "two minutes in a small file": wav(np.zeros(120 * RATE, np.float32), kind="FLAC"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_gets_one_line(served, name):
    answer = post(served, BAD_FILES[name])
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "\n" not in message
    assert "/" not in message.replace("multipart/form-data", ""), "no paths of this machine"


def raw(served, body, content_type="multipart/form-data; boundary=x", **headers):
    return httpx.post(
        served.url + "/v1/audio/transcriptions", content=body, timeout=ANSWER_SECONDS,
        headers={"Content-Type": content_type, **headers},
    )  # fmt: skip


FILE_PART = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nabc\r\n'
BAD_BODIES = {
    "JSON": (b"{}", "application/json"),
    "no type": (b"{}", ""),
    "no boundary": (FILE_PART + b"--x--\r\n", "multipart/form-data"),
    "wrong boundary": (FILE_PART + b"--x--\r\n", "multipart/form-data; boundary=other"),
    "no end": (FILE_PART, "multipart/form-data; boundary=x"),
    "no parts": (b"--x--\r\n", "multipart/form-data; boundary=x"),
    "nothing": (b"", "multipart/form-data; boundary=x"),
    "headers without an end": (
        b"--x\r\nContent-Disposition: form-data; name=" + b"a" * 100_000,
        "multipart/form-data; boundary=x",
    ),
    "two files": (FILE_PART * 2 + b"--x--\r\n", "multipart/form-data; boundary=x"),
    "many fields": (
        b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n' * 200 + FILE_PART + b"--x--\r\n",
        "multipart/form-data; boundary=x",
    ),
    "long field": (
        b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n' + b"a" * 1_000_000 + b"\r\n" + FILE_PART + b"--x--\r\n",
        "multipart/form-data; boundary=x",
    ),
    "twice": (
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n' * 2 + FILE_PART + b"--x--\r\n",
        "multipart/form-data; boundary=x",
    ),
    "unknown charset": (
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n\xff\xfe\r\n' + FILE_PART + b"--x--\r\n",
        "multipart/form-data; boundary=x; charset=nonsense",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_body_gets_one_line(served, name):
    body, content_type = BAD_BODIES[name]
    answer = raw(served, body, content_type)
    assert answer.status_code == (404 if name == "unknown charset" else 400), answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert "\n" not in error["message"]


def test_a_file_may_not_be_larger_than_the_limit(served):
    answer = post(served, bytes(5 << 20))
    assert answer.status_code == 413
    assert "--max-upload-mb" in answer.json()["error"]["message"]

    def chunks():
        yield FILE_PART.removesuffix(b"\r\n")
        for _ in range(64):
            yield bytes(1 << 17)

    assert raw(served, chunks()).status_code == 413


def cancelled(served):
    return served.state.metrics.cancelled._value.get()


def test_a_client_that_goes_gives_its_turn_back(served):
    fields = {"files": {"file": ("a.wav", recording(58.0))}, "data": {"model": "whisper"}}
    url, before = served.url + "/v1/audio/transcriptions", cancelled(served)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, **fields, timeout=httpx.Timeout(ANSWER_SECONDS, read=0.2))
    wait_until_idle(served)
    fields["data"] |= {"stream": "true"}
    with httpx.stream("POST", url, **fields, timeout=ANSWER_SECONDS) as answer:
        assert b"transcript.text.delta" in next(answer.iter_bytes())
    wait_until_idle(served)
    assert cancelled(served) - before == 2
    assert post(served).status_code == 200


def test_a_class_of_work_is_the_priority(served, monkeypatch):
    found = []
    submit = type(served.pipeline("whisper")).submit

    def noted(self, samples, *rest, priority, **options):
        found.append(priority)
        return submit(self, samples, *rest, priority=priority, **options)

    monkeypatch.setattr(type(served.pipeline("whisper")), "submit", noted)
    post(served)
    post(served, service_tier="flex")
    post(served, headers={"X-Staticllm-Class": "proactive"})
    assert found == [0, -1, -1]


def test_sound_is_counted(served):
    def counted():
        text = httpx.get(served.url + "/metrics", timeout=ANSWER_SECONDS).text
        names = ("staticllm_audio_seconds_total", "staticllm_output_tokens_total", "staticllm_device_seconds_total")
        return [
            sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name) and "whisper" in line)
            for name in names
        ]

    before = counted()
    post(served, recording(2.0))
    after = counted()
    assert after[0] - before[0] == pytest.approx(2.0)
    assert after[1] > before[1]
    assert after[2] > before[2]


def test_a_full_queue_refuses(directory):
    with serving([model_spec(f"whisper={directory}")], max_waiting=1, properties={"MAX_WINDOWS": 1}) as served:
        post(served)
        assert served.pipeline("whisper").num_windows == 1
        codes = []
        long = recording(20.0)
        threads = [threading.Thread(target=lambda: codes.append(post(served, long).status_code)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(codes) == {200, 429}
        assert post(served).status_code == 200


def test_the_schema_describes_the_form(served):
    schema = httpx.get(served.url + "/openapi.json", timeout=ANSWER_SECONDS).json()
    body = schema["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]
    assert list(body) == ["multipart/form-data"]
    fields = schema["components"]["schemas"]["TranscriptionRequest"]["properties"]
    assert {"model", "language", "prompt", "response_format", "timestamp_granularities[]", "stream"} <= set(fields)
    assert json.dumps(body["multipart/form-data"]["schema"]).count("binary") == 1


def test_options_of_a_speech_model_are_checked_before_it_is_loaded(directory):
    from staticllm.server.models.model_options import check_options
    from staticllm.server.settings import ServerSettings

    spec = model_spec(f"whisper={directory}")
    known = {"MAX_WINDOWS": 2, "MAX_PROMPT_LEN": 512, "WORD_TIMESTAMPS": True}
    check_options([demo_spec(), spec], ServerSettings(properties=known))
    with pytest.raises(ConfigError, match="WORD_TIMESTAMPS='MAYBE'"):
        check_options([spec], ServerSettings(properties={"WORD_TIMESTAMPS": "MAYBE"}))
    with pytest.raises(ConfigError, match="MAX_WINDOWS=0"):
        check_options([spec], ServerSettings(properties={"MAX_WINDOWS": 0}))
    with pytest.raises(ConfigError, match="MAX_WINDOWZ"):
        check_options([spec], ServerSettings(properties={"MAX_WINDOWZ": 2}))


FORM_FIELDS = {
    "model": "english", "prompt": "The fox", "response_format": "text", "temperature": "1", "temperatures[]": "0.9",
    "no_speech_threshold": "0.2", "logprob_threshold": "-0.5", "compression_ratio_threshold": "1.5", "language": "de",
    "timestamp_granularities[]": ("word", {"response_format": "verbose_json", "model": "english"}), "stream": "true",
    "chunking_strategy": "auto", "service_tier": "flex", "user": "me", "metadata": "a", "store": "true",
    "safety_identifier": "me", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "verbosity": "low",
    "cache_prompt": "false", "ctx_len": "64",
}  # fmt: skip
"""A value of each field of a recording's form; a tuple has the fields that it needs beside it."""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/audio/transcriptions", TranscriptionRequest), ("/v1/audio/translations", TranslationRequest)],
)
def test_each_field_of_a_form_changes_something_or_is_documented(served, monkeypatch, path, kind):
    section = DOCS.read_text().split("### Fields without effect")[1].split("\n## ")[0]
    rows = [row.split("|")[1:3] for row in section.splitlines() if f"`{path}`" in row]
    documented = {name for _, names in rows for name in re.findall(r"`([^`]+)`", names)}
    seen = []
    for name in ("whisper", "english"):
        post(served, model=name)
        pipe = served.pipeline(name)
        monkeypatch.setattr(pipe, "submit", watched(pipe.submit, name, seen))
    ignored = set()
    for name in [field.alias or name for name, field in kind.model_fields.items()]:
        value, beside = FORM_FIELDS[name] if isinstance(FORM_FIELDS[name], tuple) else (FORM_FIELDS[name], {})
        found = []
        for fields in (beside, beside | {name: value}):
            seen.clear()
            answer = post(served, path=path, **fields)
            kinds = (
                answer.headers["content-type"],
                sorted(answer.json()) if "json" in answer.headers["content-type"] else 0,
            )
            found.append((answer.status_code, kinds, str(seen)))
        ignored |= {name} if found[0] == found[1] else set()
    assert ignored == documented


def watched(submit, name, seen):
    def watch(samples, on_text, on_window, **options):
        seen.append((name, sorted(options.items())))
        return submit(samples, on_text=on_text, on_window=on_window, **options)

    return watch


@pytest.mark.parametrize("own", ["0", "0,0.4", "0.7", "0.7,0", "none"])
def test_temperature_0_is_greedy_whatever_the_model_was_loaded_with(directory, own):
    spec = replace(model_spec(f"whisper={directory}"), properties={**AS_GENAI, "TEMPERATURES": own})
    seen = []
    with serving([spec]) as served:
        post(served)
        pipe = served.pipeline("whisper")
        pipe.submit = watched(pipe.submit, "whisper", seen)
        post(served)
        assert post(served, temperature="0").status_code == 200
        assert post(served, temperature="0.3").status_code == 200
        asked = [dict(options).get("temperatures") for _, options in seen]
        assert asked == [None, FALL_BACK["temperatures"] if own.startswith("0.7") else None, (0.3,)]
        for temperature in ("0", "0.5"):
            found = post(served, temperature=temperature, **{"temperatures[]": "0.9"})
            assert found.status_code == 400
            assert found.json()["error"]["param"] == "temperature"

"""Tests transcriptions over HTTP and by the command where nobody speaks, and of files whose times do not begin at 0."""

from __future__ import annotations

import io
import json

import httpx
import pytest
from support import command_line
from support.models.whisper_directory import RATE, sound, wav, write_whisper
from support.server.served import serving

from staticllm.pipelines.speech.whisper_config import FALL_BACK
from staticllm.server.models.served import model_spec

av = pytest.importorskip("av")
pytestmark = pytest.mark.usefixtures("shared_programs")
for package in ("python_multipart", "soundfile", "soxr"):
    pytest.importorskip(package)
SECONDS = 60
PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32"}
OFF = {
    "temperatures[]": "0",
    "no_speech_threshold": "1",
    "logprob_threshold": "-1000",
    "compression_ratio_threshold": "1000",
}
"""Fields with which any text is good."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def served(directory):
    with serving([model_spec(f"whisper={directory}")], properties=PROPERTIES) as served:
        yield served


def post(served, content=None, **fields):
    content = wav(sound(2.5, 1), subtype="FLOAT") if content is None else content
    data = {"model": "whisper", "response_format": "verbose_json", **fields}
    url = served.url + "/v1/audio/transcriptions"
    return httpx.post(url, files={"file": ("a.wav", content)}, data=data, timeout=SECONDS)


def test_the_thresholds_of_whisper_are_in_force(served):
    post(served)
    config = served.pipeline("whisper").get_generation_config()
    assert {name: getattr(config, name) for name in FALL_BACK} == dict(FALL_BACK)


def test_a_window_without_speech_has_no_text(served):
    """A random model finds any text unlikely, and no speech with a probability of a thousandth."""
    kept = post(served, **OFF).json()
    assert kept["text"] and kept["segments"]
    silent = post(served, **{**OFF, "no_speech_threshold": "0", "logprob_threshold": "-0.5"}).json()
    assert (silent["text"], silent["segments"], silent["duration"]) == ("", [], 2.5)
    likely = post(served, **{**OFF, "no_speech_threshold": "0"}).json()
    assert likely["text"] == kept["text"]


def test_each_segment_says_how_it_was_heard(served):
    for fields, temperatures in (
        (OFF, {0.0}),
        ({**OFF, "temperatures[]": "0.5"}, {0.5}),
        ({"temperature": "0.7"}, {0.7}),
    ):
        found = post(served, **fields).json()["segments"]
        assert {each["temperature"] for each in found} == temperatures
        assert all(0 < each["no_speech_prob"] < 0.5 and each["avg_logprob"] < 0 for each in found)
        assert found


def test_text_that_is_not_good_is_decoded_again(served):
    fields = {**OFF, "temperatures[]": ["0", "0.9"], "compression_ratio_threshold": "1.2"}
    temperatures = {each["temperature"] for each in post(served, **fields).json()["segments"]}
    assert 0.9 in temperatures


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"no_speech_threshold": "2"}, "no_speech_threshold"),
        ({"logprob_threshold": "1"}, "logprob_threshold"),
        ({"compression_ratio_threshold": "many"}, "compression_ratio_threshold"),
        ({"temperatures[]": "-1"}, "greater than or equal to 0"),
        ({"temperatures[]": "0.2", "temperature": "0.4"}, "temperature and temperatures[]"),
    ],
)
def test_a_bad_threshold_is_one_line(served, fields, part):
    answer = post(served, **fields)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert part in message
    assert "\n" not in message


def test_properties_are_the_defaults_of_requests(directory):
    given = {**PROPERTIES, "no_speech_threshold": "0", "LOGPROB_THRESHOLD": "-0.5", "TEMPERATURES": "0"}
    with serving([model_spec(f"whisper={directory}")], properties=given) as served:
        assert post(served).json()["text"] == ""
        assert post(served, **OFF).json()["text"]


def test_without_a_threshold_verbose_json_still_has_the_probability(directory):
    with serving(
        [model_spec(f"whisper={directory}")], properties={**PROPERTIES, "NO_SPEECH_THRESHOLD": "none"}
    ) as served:
        assert all(0 < each["no_speech_prob"] < 1 for each in post(served).json()["segments"])


def film(start):
    """Return a file whose sound begins at a second."""
    content = io.BytesIO()
    with av.open(content, "w", format="matroska") as file:
        stream = file.add_stream("pcm_f32le", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(sound(2.5, 1)[None], format="flt", layout="mono")
        frame.sample_rate = RATE
        frame.pts = round(start * RATE)
        file.mux([*stream.encode(frame), *stream.encode(None)])
    return content.getvalue()


def moments(segments):
    return [(each["start"], each["end"], each["text"]) for each in segments]


def test_times_are_those_of_the_file(served, directory, tmp_path):
    early = post(served, film(0.0), **OFF).json()
    late = post(served, film(7.5), **OFF).json()
    assert late["text"] == early["text"]
    assert (early["duration"], late["duration"], late["usage"]["seconds"]) == (2.5, 10.0, 2.5)
    shifted = [(round(start + 7.5, 3), round(end + 7.5, 3), text) for start, end, text in moments(early["segments"])]
    assert moments(late["segments"]) == [pytest.approx(each) for each in shifted]
    assert shifted
    path = tmp_path / "film.mkv"
    path.write_bytes(film(7.5))
    options = ["--temperatures", "0", "--no-speech-threshold", "none", "--logprob-threshold", "none"]
    written = command_line.in_here(
        "transcribe", path, "-m", directory, "-p", "INFERENCE_PRECISION_HINT=f32", "--json", *options,
        "--compression-ratio-threshold", "none",
    )  # fmt: skip
    found = json.loads(written.stdout)
    assert found["duration"] == 10.0
    assert min(each["start"] for each in found["segments"]) >= 7.5
    assert found["text"] == early["text"]


def test_the_command_finds_silence(directory, tmp_path):
    path = tmp_path / "sound.wav"
    path.write_bytes(wav(sound(0.8, 1), subtype="FLOAT"))
    texts = {}
    for name, options in {
        "options": ["--no-speech-threshold", "0", "--logprob-threshold", "-0.5"],
        "properties": ["-p", "NO_SPEECH_THRESHOLD=0", "-p", "logprob_threshold=-0.5"],
        "none": ["--no-speech-threshold", "none"],
    }.items():
        done = command_line.in_here("transcribe", path, "-m", directory, "-p", "INFERENCE_PRECISION_HINT=f32", *options)
        assert done.returncode == 0, done.stderr
        texts[name] = done.stdout.strip()
    assert texts["options"] == texts["properties"] == ""
    assert texts["none"]
    refused = command_line.in_here("transcribe", path, "-m", directory, "--no-speech-threshold", "3")
    assert refused.returncode == 1
    assert "no_speech_threshold=3.0: must be a number from 0 to 1" in refused.stderr

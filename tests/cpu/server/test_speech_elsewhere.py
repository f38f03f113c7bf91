"""Tests speech models of a server that run in another process: in a worker of their own, or in the daemon."""

from __future__ import annotations

from dataclasses import replace

import httpx
import psutil
import pytest
from support.attach.daemons import daemon_process, wait_for
from support.helpers import EXACT
from support.models.whisper_directory import AS_GENAI, sound, wav, write_whisper
from support.server.served import serving

from staticllm import StaticWhisperPipeline
from staticllm.daemon.process import lifetime
from staticllm.server.models.served import demo_spec, model_spec

for package in ("python_multipart", "soundfile", "soxr"):
    pytest.importorskip(package)
SECONDS = 120


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def expected(directory):
    with StaticWhisperPipeline(directory, **EXACT) as pipe:
        return str(pipe.generate(sound(0.8))).strip()


def spec_of(directory):
    return replace(model_spec(f"whisper={directory}"), properties={**EXACT, **AS_GENAI})


def written(served):
    """Return the text of a recording."""
    file = ("a.wav", wav(sound(0.8), subtype="FLOAT"))
    answer = httpx.post(
        served.url + "/v1/audio/transcriptions", files={"file": file}, data={"model": "whisper"}, timeout=SECONDS
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["text"]


def test_a_speech_model_of_the_daemon_is_loaded_again(run_folder, monkeypatch, directory, expected):
    with daemon_process(monkeypatch, run_folder) as process:
        specs = [demo_spec(), spec_of(directory)]
        with serving(specs, runs_in="daemon", properties=EXACT) as served:
            assert written(served) == expected
            assert served.state.hub.models["whisper"].home is not None
            paths = [model["path"] for model in lifetime.status(run_folder)["models"]]
            assert any(str(directory) in path for path in paths)
            process.kill()
            process.wait()
            assert written(served) == expected
        lifetime.stop(run_folder)


def test_a_speech_model_has_a_worker_of_its_own(run_folder, directory, expected):
    with serving([spec_of(directory)], runs_in="worker", properties=EXACT) as served:
        assert written(served) == expected
        model = served.state.hub.models["whisper"]
        first = model.home.pid
        psutil.Process(first).kill()
        wait_for(lambda: model.home.pid not in (None, first) and not model.is_lost, SECONDS)
        assert written(served) == expected

"""Compares what Whisper tiny.en writes where nobody speaks with faster-whisper: nothing where that writes nothing.

python scripts/real_whisper.py && pip install faster-whisper && pytest --all tests/peer/test_silence.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from staticllm import StaticWhisperPipeline
from staticllm.pipelines.speech.speech_jobs import with_fall_back

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from real_models import MODELS, folder
from real_whisper import is_whole, place

RATE = 16000
COUNT = 8 * RATE
TIMES = np.arange(COUNT) / RATE
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_whole(), reason="no Whisper tiny.en: python scripts/real_whisper.py"),
]


def sine(hertz):
    return np.sin(2 * np.pi * hertz * TIMES)


def brown(random):
    found = np.cumsum(random.normal(0, 1, COUNT))
    found -= np.convolve(found, np.ones(4000) / 4000, "same")
    return 0.1 * found / np.abs(found).max()


def clicks(random):
    found = np.zeros(COUNT)
    found[random.integers(0, COUNT, 60)] = random.uniform(-0.9, 0.9, 60)
    return found


SOUNDS = {
    **{
        f"white noise {share}": lambda random, share=share: random.normal(0, share, COUNT)
        for share in (0.01, 0.03, 0.05)
    },
    "white noise, 2 s": lambda random: random.normal(0, 0.02, 2 * RATE),
    "white noise, 40 s": lambda random: random.normal(0, 0.02, 40 * RATE),
    "modulated noise": lambda random: random.normal(0, 0.05, COUNT) * (0.5 + 0.5 * sine(0.7)),
    "silence": lambda random: np.zeros(COUNT),
    "silence, 1 s": lambda random: np.zeros(RATE),
    "dither": lambda random: random.normal(0, 1e-4, COUNT),
    "hum": lambda random: 0.1 * sine(50) + 0.05 * sine(100) + 0.03 * sine(150),
    "hum and noise": lambda random: 0.05 * sine(60) + random.normal(0, 0.003, COUNT),
    "clicks": clicks,
    "brown noise": brown,
    **{f"tone of {hertz} Hz": lambda random, hertz=hertz: 0.2 * sine(hertz) for hertz in (440, 3000)},
    "beeps": lambda random: 0.3 * sine(800) * (TIMES % 1 < 0.2),
    "square wave": lambda random: 0.1 * np.sign(sine(100)),
}


@pytest.fixture(scope="module")
def peer():
    faster_whisper = pytest.importorskip("faster_whisper")
    return faster_whisper.WhisperModel(str(folder() / MODELS["whisper"].file), device="cpu", compute_type="float32")


@pytest.fixture(scope="module")
def pipe():
    with StaticWhisperPipeline(place() / "stateful", config=with_fall_back(F32)) as found:
        yield found


@pytest.mark.parametrize("name", SOUNDS)
@pytest.mark.parametrize("has_times", [False, True])
def test_nothing_is_written_where_the_peer_writes_nothing(pipe, peer, name, has_times):
    samples = SOUNDS[name](np.random.default_rng(0)).astype(np.float32)
    segments, _ = peer.transcribe(samples)
    expected = "".join(segment.text for segment in segments)
    windows = []
    found = str(pipe.submit(samples, on_window=windows.append, return_timestamps=has_times).result())
    assert not found or expected, (found, windows)
    assert all(window.no_speech_prob is not None for window in windows)

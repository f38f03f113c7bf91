"""Tests that recordings have the times of their files: beginnings, gaps, overlaps, and times that are wrong or missing."""

from __future__ import annotations

import io
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

from staticllm.errors import PromptError
from staticllm.pipelines.speech import audio
from staticllm.pipelines.speech.audio import RATE, read_audio, read_recording

av = pytest.importorskip("av")
FRAME = 1600
"""Samples of a frame: 0.1 s."""
SOUND = (0.3 * np.sin(np.arange(2 * RATE) * 0.1)).astype(np.float32)
FORMS = (("matroska", "pcm_s16le"), ("mov", "aac"), ("mp4", "aac"), ("webm", "libopus"), ("mpegts", "aac"))


def file_of(starts, form="matroska", codec="pcm_s16le"):
    """Return a file whose frames of 0.1 s begin at given seconds."""
    content = io.BytesIO()
    with av.open(content, "w", format=form) as file:
        stream = file.add_stream(codec, rate=RATE, layout="mono")
        for number, start in enumerate(starts):
            samples = SOUND[number * FRAME : (number + 1) * FRAME]
            frame = av.AudioFrame.from_ndarray((samples * 32767).astype(np.int16)[None], format="s16", layout="mono")
            frame.sample_rate = RATE
            frame.pts = round(start * RATE)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return content.getvalue()


def evenly(count=20, start=0.0):
    return [start + 0.1 * number for number in range(count)]


def is_loud(samples, start, end):
    """Return whether there is sound from one second to another, of which none is silent."""
    part = np.abs(samples[round(start * RATE) : round(end * RATE)])
    return len(part) > 0 and part[: len(part) // 160 * 160].reshape(-1, 160).max(axis=1).min() > 0.1


@pytest.mark.parametrize(("form", "codec"), FORMS)
@pytest.mark.parametrize("start", [0.0, 0.7, 2.0, 60.0])
def test_sound_begins_when_its_file_says(form, codec, start):
    if form == "mpegts":
        pytest.skip("its clock runs on from one program to the next")
    content = file_of(evenly(start=start), form, codec)
    found = read_recording(content)
    assert found.start == pytest.approx(start, abs=0.1)
    assert len(found.samples) / RATE == pytest.approx(2.0, abs=0.15)
    whole = read_audio(content)
    assert len(whole) == len(found.samples) + round(max(0.0, found.start) * RATE)
    assert not whole[: max(0, round((start - 0.1) * RATE))].any()
    assert is_loud(whole, start + 0.1, start + 1.9)


def test_a_broadcast_begins_with_its_first_sound_or_picture():
    assert read_recording(file_of(evenly(start=5000.0), "mpegts", "aac")).start == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize(("form", "codec"), [each for each in FORMS if each[1] != "pcm_s16le" or each[0] != "mov"])
@pytest.mark.parametrize("gap", [0.3, 2.0, 45.0])
def test_a_gap_is_silence(form, codec, gap):
    samples = read_audio(file_of([*evenly(10), *evenly(10, 1.0 + gap)], form, codec))
    assert len(samples) / RATE == pytest.approx(2.0 + gap, abs=0.2)
    assert is_loud(samples, 0.1, 0.9)
    assert is_loud(samples, 1.2 + gap, 1.9 + gap)
    assert np.abs(samples[round(1.15 * RATE) : round((0.85 + gap) * RATE)]).max(initial=0.0) < 0.02


def test_several_gaps_and_jitter():
    random = np.random.default_rng(0)
    for _ in range(20):
        gaps = random.choice([0.0, 0.0, 0.0, 0.5, 1.5], 20)
        starts = np.cumsum(0.1 + gaps) + random.uniform(-0.02, 0.02, 20) - 0.1 - gaps[0] + 0.05
        samples = read_audio(file_of(starts.tolist()))
        assert len(samples) / RATE == pytest.approx(starts[-1] + 0.1, abs=0.1)


@pytest.mark.parametrize("overlap", [0.05, 0.5, 30.0])
def test_no_sound_is_lost_where_frames_overlap(overlap):
    assert len(read([*evenly(10, 40.0), *evenly(10, 41.0 - overlap)]).samples) == 2 * RATE


def test_a_gap_after_an_overlap_brings_the_times_back():
    found = read([*evenly(10), *evenly(5, 0.5), *evenly(5, 3.0)])
    assert len(found.samples) / RATE == pytest.approx(3.5, abs=0.01)


def test_a_gap_after_a_clock_was_set_back_is_as_long_as_it_is():
    found = read([*evenly(10, 40.0), *evenly(5, 0.0), *evenly(5, 2.5)])
    assert len(found.samples) / RATE == pytest.approx(4.0, abs=0.01)


class Frames:
    """A file of ``av`` with frames whose times no muxer writes."""

    start_time, duration, format = None, None, type("Format", (), {"name": "matroska"})

    def __init__(self, moments):
        self.moments = moments

    def decode(self, audio):
        for number, moment in enumerate(self.moments):
            frame = av.AudioFrame.from_ndarray(
                SOUND[None, number * FRAME : (number + 1) * FRAME], format="flt", layout="mono"
            )
            frame.sample_rate, frame.time_base = RATE, Fraction(1, RATE)
            frame.pts = None if moment is None else round(moment * RATE)
            yield frame


def read(moments, max_seconds=3600.0):
    """Return the recording of frames with given times."""

    def resampler():
        return av.AudioResampler(format="fltp", rate=RATE)

    return audio._joined(audio._timed_pieces(Frames(moments), resampler), "it", max_seconds)


@pytest.mark.parametrize(
    ("moments", "start", "seconds"),
    [
        ([None] * 20, 0.0, 2.0),
        ([None, *evenly(19, 0.1)], 0.0, 2.0),
        ([*evenly(10), None, *evenly(9, 3.0)], 0.0, 3.9),
        ([*evenly(10), *[None] * 10], 0.0, 2.0),
        (evenly(start=-0.5), -0.5, 2.0),
        (evenly(start=-50.0), 0.0, 2.0),
        (evenly(start=-1e9), 0.0, 2.0),
        ([-1e9, *evenly(19, 5.0)], 0.0, 6.9),
        ([5.0] * 20, 5.0, 2.0),
    ],
)
def test_times_that_are_negative_or_missing(moments, start, seconds):
    found = read(moments)
    assert found.start == pytest.approx(start)
    assert len(found.samples) / RATE == pytest.approx(seconds, abs=0.01)


@pytest.mark.parametrize("moments", [[1e9], [*evenly(5), 1e9], [*evenly(5), 3700.0], [3599.0, 3599.1, 3602.0], [4e12]])
def test_impossible_times_are_one_line_and_no_memory(moments):
    tracemalloc.start()
    try:
        with pytest.raises(PromptError, match="at most 1 hours can be transcribed") as caught:
            read(moments)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


def test_a_whole_file_with_an_impossible_time_is_one_line():
    for starts in ([*evenly(10), 1e6], [1e6]):
        with pytest.raises(PromptError, match="at most") as caught:
            read_audio(file_of(starts), max_seconds=3600.0)
        assert "\n" not in str(caught.value)

"""Tests windows of one recording that are heard together: they give what they give one by one, and come out in order."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from support.helpers import one_line
from support.models.speech_model import COLUMNS
from support.models.whisper_directory import sound, write_whisper

from staticllm import StaticWhisperPipeline
from staticllm.errors import ConfigError, DeviceError
from staticllm.pipelines import whisper_pipeline
from staticllm.pipelines.speech.voice import FRAME
from tests.support.inside import speech_of

SECONDS = 60
RECORDING = sound(7, 3)
QUIET = slice(70, 125)
"""Frames without speech: 1.8 s, of which 0.2 s at each end are heard."""


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    directory = write_whisper(tmp_path_factory.mktemp("whisper"))
    with StaticWhisperPipeline(directory, INFERENCE_PRECISION_HINT="f32") as found:
        yield found


def detect(samples):
    """Return probabilities of speech that cut a recording into windows of different lengths."""
    found = np.random.default_rng(5).uniform(0.6, 1, -(-len(samples) // FRAME)).astype(np.float32)
    found[QUIET] = 0
    return found


@pytest.fixture(autouse=True)
def use_of_it(pipe, monkeypatch):
    """Detect as above; after each test, no window and no thread of a window may be left."""
    monkeypatch.setattr(whisper_pipeline, "voice_detector", lambda: detect)
    yield
    pipe.engine.run_between_steps(lambda: None)
    assert pipe.engine.runner.cache.cross.num_free == pipe.num_windows
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staticllm-window")]


def heard(pipe, count, **options):
    """Return the result and the windows, in the order in which they were told."""
    told = []
    handle = pipe.submit(RECORDING, parallel_windows=count, on_window=told.append, **options)
    return handle.result(SECONDS), list(map(exact, told))


def exact(window):
    """Return a window without the digits that depend on the rows of its calls."""
    return replace(window, avg_logprob=round(window.avg_logprob, 3))


@contextmanager
def hearing(pipe, monkeypatch, before, after=lambda number: None):
    """Call ``before`` and ``after`` with the number of each window that is heard, by the order of their beginnings."""
    encode, lock, numbers = speech_of(pipe).encode, threading.Lock(), iter(range(1000))

    @contextmanager
    def noted(*arguments, **options):
        with lock:
            number = next(numbers)
        before(number)
        with encode(*arguments, **options) as window:
            yield window
        after(number)

    with monkeypatch.context() as patch:
        patch.setattr(speech_of(pipe), "encode", noted)
        yield


@pytest.mark.parametrize("options", [{}, {"language": "<|de|>", "return_timestamps": True}])
def test_windows_heard_together_give_what_they_give_one_by_one(pipe, options):
    expected, windows = heard(pipe, 1, **options)
    assert len(windows) >= 6 and str(expected)
    with pipe.engine.record() as trace:
        found, others = heard(pipe, 4, **options)
    assert max(len(step.decode) for step in trace.steps) > 2, "their rows share calls"
    assert str(found) == str(expected) and found.language == expected.language
    assert str(found.chunks) == str(expected.chunks)
    assert others == windows


def test_windows_leave_the_silence_out(pipe):
    _, windows = heard(pipe, 4)
    silence = [QUIET.start * FRAME / 16000 + 0.2, QUIET.stop * FRAME / 16000 - 0.2]
    assert not any(silence[0] <= window.start < silence[1] - 0.1 for window in windows)
    assert any(window.start < silence[0] for window in windows) and any(window.start >= 3 for window in windows)


def test_a_window_hears_nothing_of_the_next_one(pipe, monkeypatch):
    """After the end of its part there are zeros, as after the end of a recording."""
    encode, lengths = speech_of(pipe).encode, []

    def noted(features, *rest, **options):
        lengths.append(int(np.flatnonzero(features.any(axis=0)).max()) + 1)
        return encode(features, *rest, **options)

    monkeypatch.setattr(speech_of(pipe), "encode", noted)
    _, windows = heard(pipe, 1)
    starts = [round(window.start * COLUMNS) for window in windows]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    parts = pairwise(zip(starts, ends, strict=True))
    assert all(start >= end_before or end == end_before for (_, end_before), (start, end) in parts)
    assert len(set(lengths)) > 1


def test_they_come_out_in_order_if_the_first_one_is_the_last_to_end(pipe, monkeypatch):
    expected, windows = heard(pipe, 1, language="<|en|>")
    others = threading.Semaphore(0)
    ended, texts = [], []

    def before(number):
        for _ in range(3 if number == 0 else 0):
            assert others.acquire(timeout=SECONDS)

    def after(number):
        ended.append(number)
        others.release()

    with hearing(pipe, monkeypatch, before, after):
        found, told = heard(pipe, 4, language="<|en|>", on_text=texts.append)
    assert ended.index(0) >= 3
    assert [window.start for window in told] == sorted(window.start for window in told)
    assert told == windows
    assert str(found) == str(expected) == "".join(texts)


def test_a_cancelled_one_ends_all_its_windows(pipe):
    told = []

    def cancel(window):
        told.append(window)
        handle.cancel()

    is_submitted = threading.Event()
    handle = pipe.submit(
        RECORDING, parallel_windows=3, on_window=lambda window: (is_submitted.wait(SECONDS), cancel(window))
    )
    is_submitted.set()
    with pytest.raises(CancelledError):
        handle.result(SECONDS)
    _, windows = heard(pipe, 1)
    assert told and list(map(exact, told)) == windows[: len(told)]


def test_an_error_in_the_middle_ends_the_others_after_the_windows_before_it(pipe, monkeypatch):
    expected, windows = heard(pipe, 1, language="<|en|>")
    told = []

    def fail(number):
        if number == 4:
            raise DeviceError("broken")

    with hearing(pipe, monkeypatch, fail):
        handle = pipe.submit(RECORDING, parallel_windows=3, on_window=told.append, language="<|en|>")
        with pytest.raises(DeviceError, match="broken"):
            handle.result(SECONDS)
    assert list(map(exact, told)) == windows[: len(told)] and len(told) < len(windows)
    again, _ = heard(pipe, 3, language="<|en|>")
    assert str(again) == str(expected)


def test_a_streamer_that_stops_or_raises_ends_all_windows(pipe):
    with pytest.raises(KeyboardInterrupt):
        pipe.generate(RECORDING, parallel_windows=4, streamer=interrupt)
    stopped = pipe.generate(RECORDING, parallel_windows=4, streamer=lambda text: True)
    whole = pipe.generate(RECORDING, parallel_windows=4)
    assert str(whole).startswith(str(stopped)) and len(str(stopped)) < len(str(whole))


def interrupt(text):
    raise KeyboardInterrupt


def test_a_recording_without_speech_has_no_text(pipe, monkeypatch):
    silent = np.zeros(-(-len(RECORDING) // FRAME), np.float32)
    monkeypatch.setattr(whisper_pipeline, "voice_detector", lambda: lambda samples: silent)
    found, windows = heard(pipe, 4)
    assert (str(found).strip(), windows) == ("", [])


def test_without_the_option_nothing_is_detected(pipe, monkeypatch):
    monkeypatch.setattr(whisper_pipeline, "voice_detector", lambda: 1 / 0)
    assert str(pipe.generate(RECORDING))


@pytest.mark.parametrize("count", [0, 65, "two", True])
def test_an_impossible_number_is_refused_in_one_line(pipe, count):
    for call in (pipe.generate, pipe.submit):
        with pytest.raises(ConfigError, match="parallel_windows") as caught:
            call(RECORDING, parallel_windows=count)
        assert one_line(caught)

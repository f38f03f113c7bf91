"""Tests that words are those of the text, each once and in order, and that nothing ends after its recording."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from support.models.speech_model import POSITIONS
from support.models.whisper_directory import RATE, sound, write_whisper

from staticllm import StaticWhisperPipeline
from staticllm.pipelines import whisper_pipeline
from staticllm.pipelines.speech.voice import FRAME
from tests.support.attach.daemons import daemon_thread

F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "word_timestamps": True}
LENGTHS = (*range(1, 13), 20, 36, POSITIONS)
"""Values of ``max_new_tokens``: short ones end windows within a segment, the longest one fills all positions."""
OPTIONS = ({}, {"return_timestamps": True}, {"num_beams": 3}, {"initial_prompt": "Once upon a time"})
SECONDS = 60


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def pipe(directory):
    with StaticWhisperPipeline(directory, **F32) as found:
        yield found


def detect(samples):
    """Return probabilities of speech that cut a recording into windows of different lengths."""
    return np.random.default_rng(5).uniform(0.6, 1, -(-len(samples) // FRAME)).astype(np.float32)


def check(found, seconds):
    """Check the words and the segments of a transcription of a recording."""
    assert "".join(word.word for word in found.words) == str(found)
    moments = [moment for word in found.words for moment in (word.start_ts, word.end_ts)]
    assert moments == sorted(moments)
    for start, end in [
        *((word.start_ts, word.end_ts) for word in found.words),
        *((chunk.start_ts, chunk.end_ts) for chunk in found.chunks or ()),
    ]:
        assert 0 <= start <= seconds
        assert end == -1 or start <= end <= seconds
    for chunk, following in pairwise(found.chunks or ()):
        assert chunk.end_ts == -1 or chunk.end_ts <= following.start_ts


@pytest.mark.parametrize("length", LENGTHS)
def test_words_are_those_of_the_text(pipe, length):
    random = np.random.default_rng(length)
    for options, seconds in product(OPTIONS, (0.02, 0.8, 3.3)):
        samples = sound(seconds, int(random.integers(1000)))
        found = pipe.generate(samples, max_new_tokens=length, **options)
        check(found, len(samples) / RATE)
        assert [token for word in found.words for token in word.token_ids] or not str(found)


@pytest.mark.parametrize("length", LENGTHS[::3])
def test_words_of_windows_that_are_heard_together(pipe, length, monkeypatch):
    monkeypatch.setattr(whisper_pipeline, "voice_detector", lambda: detect)
    for seconds in (0.8, 4.6):
        found = pipe.generate(sound(seconds, length), parallel_windows=3, max_new_tokens=length, return_timestamps=True)
        check(found, seconds)


@pytest.mark.parametrize("length", LENGTHS[::3])
def test_words_of_a_stream_and_of_one_that_stops(pipe, length):
    for seconds in (0.8, 3.3):
        pieces = []
        found = pipe.generate(sound(seconds, length), streamer=pieces.append, max_new_tokens=length)
        check(found, seconds)
        assert "".join(pieces) == str(found)
        count = iter(range(1000))
        stopped = pipe.generate(
            sound(seconds, length), streamer=lambda text, count=count: next(count) == 1, max_new_tokens=length
        )
        check(stopped, seconds)
        assert str(found).startswith(str(stopped))


def test_words_of_the_daemon(directory, pipe, tmp_path, monkeypatch):
    with (
        daemon_thread(monkeypatch, tmp_path / "run"),
        StaticWhisperPipeline(directory, daemon=True, **F32) as there,
    ):
        for length in LENGTHS[::4]:
            samples = sound(3.3, length)
            found = there.generate(samples, max_new_tokens=length, return_timestamps=True)
            check(found, 3.3)
            assert found.words == pipe.generate(samples, max_new_tokens=length, return_timestamps=True).words


def test_windows_that_are_decoded_again_or_dropped_have_the_words_of_what_is_kept(pipe):
    texts = set()
    for threshold, no_speech in product((-0.5, -3.0), (None, 0.0, 0.0005)):
        found = pipe.generate(
            sound(3.3, 4), max_new_tokens=9, temperatures=(0.0, 0.6), logprob_threshold=threshold,
            no_speech_threshold=no_speech, rng_seed=3,
        )  # fmt: skip
        check(found, 3.3)
        texts.add(str(found))
    assert "" in texts and len(texts) > 1

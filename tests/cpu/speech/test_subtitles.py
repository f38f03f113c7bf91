"""Tests the forms in which transcriptions are written."""

from __future__ import annotations

import json

import pytest

from staticllm.errors import ConfigError
from staticllm.pipelines.speech.results import WhisperDecodedResultChunk, WhisperDecodedResults, WhisperWordTiming
from staticllm.pipelines.speech.subtitles import Layout, time_of, written


def results_of(*chunks, words=None):
    text = "".join(chunk[2] for chunk in chunks)
    return WhisperDecodedResults([text], [1.0], "en", [WhisperDecodedResultChunk(*chunk) for chunk in chunks], words)


TWO = results_of((0.0, 2.5, " Hi there!"), (3661.25, 3662.0, " A < B --> C & D"))


def test_srt():
    assert written(TWO, "srt") == (
        "1\n00:00:00,000 --> 00:00:02,500\nHi there!\n\n2\n01:01:01,250 --> 01:01:02,000\nA < B -> C & D\n\n"
    )


def test_vtt():
    assert written(TWO, "vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHi there!\n\n"
        "01:01:01.250 --> 01:01:02.000\nA &lt; B --&gt; C &amp; D\n\n"
    )


def test_tsv():
    assert written(results_of((0.0, 1.5, " a\tb\nc")), "tsv") == "start\tend\ttext\n0\t1500\ta b c\n"


def test_txt():
    assert written(TWO, "txt") == "Hi there! A < B --> C & D\n"
    assert written(results_of((0.0, 1.0, "  ")), "txt") == ""


def test_json_is_that_of_openai():
    words = [WhisperWordTiming(" Hi", [5], 0.1, 0.34)]
    found = json.loads(written(results_of((0.0, 1.5, " Hi ü"), words=words), "json", Layout(duration=2.0)))
    assert found == {
        "language": "en", "text": "Hi ü", "duration": 2.0,
        "segments": [{"id": 0, "start": 0.0, "end": 1.5, "text": "Hi ü"}],
        "words": [{"word": "Hi", "start": 0.1, "end": 0.34}],
    }  # fmt: skip
    assert json.loads(written(WhisperDecodedResults([" x"], [1.0], "de"), "json")) == {"language": "de", "text": "x"}


def test_long_lines_are_wrapped():
    text = " " + "word " * 20
    found = written(results_of((0.0, 1.0, text)), "srt", Layout(line_chars=42)).splitlines()[2:-1]
    assert len(found) == 3
    assert max(map(len, found)) <= 42
    assert " ".join(found).split() == text.split()


def test_a_blank_line_in_a_text_does_not_end_a_cue():
    assert written(results_of((0.0, 1.0, "a\n\nb")), "vtt").count("\n\n") == 2


def test_chunks_without_text_are_left_out():
    assert written(results_of((0.0, 1.0, " "), (1.0, 2.0, "b")), "srt").startswith("1\n00:00:01,000")


@pytest.mark.parametrize(
    ("chunks", "duration", "expected"),
    [
        ([(1.0, -1.0, "a"), (4.0, 5.0, "b")], None, "00:00:04.000"),
        ([(1.0, -1.0, "a")], 9.5, "00:00:09.500"),
        ([(1.0, -1.0, "a")], None, "00:00:01.000"),
        ([(1.0, 0.5, "a")], None, "00:00:01.000"),
    ],
)
def test_the_end_of_a_chunk_that_has_none(chunks, duration, expected):
    assert f"00:00:01.000 --> {expected}" in written(results_of(*chunks), "vtt", Layout(duration=duration))


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, "00:00:00.000"), (59.9996, "00:01:00.000"), (360000.001, "100:00:00.001")]
)
def test_times(seconds, expected):
    assert time_of(seconds) == expected


def test_impossible_forms():
    with pytest.raises(ConfigError, match="form='doc': must be one of srt, vtt, json, tsv, txt"):
        written(TWO, "doc")
    with pytest.raises(ConfigError, match="srt needs the times of the text"):
        written(WhisperDecodedResults([" x"], [1.0], "de"), "srt")

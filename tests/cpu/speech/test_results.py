"""Tests that results have the attributes of GenAI's classes, and are taken for them."""

from __future__ import annotations

import pickle

import pytest
from openvino_genai import py_openvino_genai as genai

from staticllm.pipelines.speech import results
from staticllm.pipelines.speech.results import (
    WhisperDecodedResultChunk,
    WhisperDecodedResults,
    WhisperPerfMetrics,
    WhisperRawPerfMetrics,
    WhisperWordTiming,
    chunks_of,
)
from staticllm.pipelines.speech.segments import SpeechSegment

NAMES = (
    "WhisperDecodedResultChunk", "WhisperDecodedResults", "WhisperPerfMetrics", "WhisperRawPerfMetrics", "WhisperWordTiming",
)  # fmt: skip


def example():
    raw = WhisperRawPerfMetrics([3000.0], [0.0], [5000.0, 7000.0], [1000.0, 2000.0, 3000.0])
    metrics = WhisperPerfMetrics(9.0, whisper_raw_metrics=raw)
    metrics.count(4, 3, 0)
    word = WhisperWordTiming(" Hi", [5], 0.1, 0.4)
    chunk = WhisperDecodedResultChunk(0.0, 1.5, " Hi")
    return WhisperDecodedResults([" Hi"], [1.0], "en", [chunk], [word], metrics)


@pytest.mark.parametrize("name", NAMES)
def test_every_attribute_of_genai_is_there(name):
    ours = {
        "WhisperDecodedResultChunk": lambda: example().chunks[0],
        "WhisperDecodedResults": example,
        "WhisperPerfMetrics": lambda: example().perf_metrics,
        "WhisperRawPerfMetrics": lambda: example().perf_metrics.whisper_raw_metrics,
        "WhisperWordTiming": lambda: example().words[0],
    }[name]()
    theirs = [each for each in dir(getattr(genai, name)) if not each.startswith("_")]
    assert [each for each in theirs if not hasattr(ours, each)] == []
    assert type(ours) is getattr(results, name)
    if name != "WhisperPerfMetrics":
        assert isinstance(ours, getattr(genai, name))
        assert pickle.loads(pickle.dumps(ours)) == ours or name == "WhisperDecodedResults"


def test_a_result_shows_its_text():
    assert str(example()) == " Hi"
    assert str(WhisperDecodedResults(["a", "b"], [0.5, 1.0], "en")) == "0.500000: a\n1.000000: b"


def test_metrics_are_in_ms_and_can_be_added():
    one = example().perf_metrics
    both = one + one
    assert one.get_encode_inference_duration() == (6.0, 1.0)
    assert one.get_decode_inference_duration().mean == 2.0
    assert one.get_features_extraction_duration().mean == 3.0
    assert one.get_word_level_timestamps_processing_duration().mean == 0.0
    assert both.whisper_raw_metrics.encode_inference_durations == [5000.0, 7000.0] * 2
    assert (both.get_num_generated_tokens(), both.get_load_time()) == (6, 9.0)
    assert isinstance(both, WhisperPerfMetrics)


def test_a_segment_without_an_end_ends_at_minus_one():
    segments = [SpeechSegment(0.0, 2.0, (1, 2)), SpeechSegment(2.0, None, (3,))]
    assert chunks_of(segments, lambda tokens: f"{tokens}") == [
        WhisperDecodedResultChunk(0.0, 2.0, "[1, 2]"),
        WhisperDecodedResultChunk(2.0, -1.0, "[3]"),
    ]

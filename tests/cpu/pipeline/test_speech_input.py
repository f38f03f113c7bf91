"""Tests what a speech pipeline refuses, and that it is as before after errors and interrupts of its caller."""

from __future__ import annotations

import array
from concurrent.futures import CancelledError

import numpy as np
import openvino_genai as genai
import pytest
from support.helpers import one_line
from support.models.whisper_directory import sound, write_whisper

from staticllm import StaticWhisperPipeline
from staticllm.errors import GenerationConfigError
from staticllm.pipelines.speech import transcription_handle

F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
SECONDS = 60
SAMPLES = sound(1.6, 3)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    with StaticWhisperPipeline(write_whisper(tmp_path_factory.mktemp("whisper")), **F32) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def expected(pipe):
    return str(pipe.generate(SAMPLES))


@pytest.fixture(params=["generate", "submit"])
def run(request, pipe):
    """A function that transcribes to the end, in either way."""
    if request.param == "generate":
        return pipe.generate
    return lambda *args, **kwargs: pipe.submit(*args, **kwargs).result(SECONDS)


def genais_own(**fields):
    """Return GenAI's config with fields set; its token ids are those of a larger vocabulary."""
    config = genai.WhisperGenerationConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("priority", [None, "1", 1.5, [1], np.bool_(True), np.array([1, 2]), 1 << 40], ids=repr)
def test_a_priority_that_is_none_is_one_line(run, pipe, expected, priority):
    with pytest.raises(GenerationConfigError, match=r"priority=.*must be a whole number") as caught:
        run(SAMPLES, priority=priority)
    one_line(caught)
    assert str(pipe.generate(SAMPLES)) == expected


@pytest.mark.parametrize("name", ["initial_prompt", "hotwords", "language", "task"])
def test_half_a_character_is_one_line(run, pipe, expected, name):
    with pytest.raises(GenerationConfigError, match=f"{name} has half of a surrogate pair") as caught:
        run(SAMPLES, **{name: "a fox\ud83d"})
    one_line(caught)
    assert str(pipe.generate(SAMPLES)) == expected


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "decoder_start_token_id=50258"), ({"repetition_penalty": 1.5}, "decoder_start_token_id=50258"),
        ({"decoder_start_token_id": 5}, "no_timestamps_token_id=50363"),
        ({"decoder_start_token_id": 5, "no_timestamps_token_id": 6, "hotwords": "fox"}, "prev_sot_token_id=50361"),
        ({"decoder_start_token_id": 5, "no_timestamps_token_id": 6}, "translate_token_id=50358"),
    ],
    ids=str,
)  # fmt: skip
def test_tokens_of_another_model_are_one_line(run, pipe, expected, fields, name):
    with pytest.raises(GenerationConfigError, match=f"{name}: ids go from 0 to") as caught:
        run(SAMPLES, genais_own(**fields))
    one_line(caught)
    assert str(pipe.generate(SAMPLES)) == expected


@pytest.mark.parametrize("kind", [np.array, memoryview, lambda samples: array.array("f", samples)])
def test_a_buffer_may_be_filled_again_after_submit(pipe, expected, kind):
    given = SAMPLES.copy()
    buffer = kind(given)
    handles = [pipe.submit(buffer) for _ in range(4)]
    np.frombuffer(buffer, np.float32)[:] = 0.0
    assert [str(handle.result(SECONDS)) for handle in handles] == [expected] * 4


def test_an_interrupt_while_its_thread_begins_ends_a_transcription(pipe, expected, monkeypatch):
    start_thread, threads, told = transcription_handle.start_thread, [], []

    def start_and_interrupt(*arguments):
        threads.append(start_thread(*arguments))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transcription_handle, "start_thread", start_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            pipe.submit(np.tile(SAMPLES, 100), on_window=told.append)
    threads[0].join(SECONDS)
    assert not threads[0].is_alive()
    assert not told or told[-1].seconds < 100, "it has heard all"
    assert str(pipe.generate(SAMPLES)) == expected


def test_no_half_text_if_a_function_of_the_caller_raises_a_cancelled_error(pipe, expected):
    """A streamer that waits for a future of the caller's, which is cancelled."""

    def fail(told):
        raise CancelledError

    with pytest.raises(CancelledError):
        pipe.generate(SAMPLES, None, fail)
    for functions in ({"on_text": fail}, {"on_window": fail}):
        with pytest.raises(CancelledError):
            pipe.submit(SAMPLES, **functions).result(SECONDS)
    assert str(pipe.generate(SAMPLES)) == expected

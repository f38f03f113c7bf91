"""Tests streamers that raise, return nonsense or call the pipeline: the caller gets the error, and the pipeline stays usable."""

from __future__ import annotations

import numpy as np
import openvino_genai as genai
import pytest
from support.helpers import assert_nothing_held, one_line

from staticllm import GenerationConfigError, PromptTooLongError, StaticLLMError, StaticLLMPipeline

pytestmark = pytest.mark.usefixtures("shared_programs")

GREEDY = {"max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared_pipe(zoo):
    return StaticLLMPipeline(
        zoo / "llama", "CPU", MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=32, INFERENCE_PRECISION_HINT="f32"
    )


@pytest.fixture
def pipe(shared_pipe):
    """Check after each test that the pipeline still gives the same answer and has lost no slot."""
    prompt = np.array([5, 6, 7])
    before = shared_pipe.generate(prompt, **GREEDY).tokens
    yield shared_pipe
    assert shared_pipe.generate(prompt, **GREEDY).tokens == before
    assert_nothing_held(shared_pipe)


class Failed(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("fails_at", [1, 3])
def test_an_exception_in_the_users_streamer_reaches_the_caller(pipe, fails_at):
    pieces = []

    def streamer(piece):
        pieces.append(piece)
        if len(pieces) == fails_at:
            raise Failed("mine")

    with pytest.raises(Failed, match="mine"):
        pipe.generate("hello", streamer=streamer, max_new_tokens=20, ignore_eos=True)
    assert len(pieces) == fails_at


def test_an_exception_in_a_streamer_object_reaches_the_caller(pipe):
    class Streamer(genai.StreamerBase):
        def write(self, token):
            raise Failed(token)

        def end(self):
            pass

    with pytest.raises(Failed):
        pipe.generate(np.array([5, 6, 7]), streamer=Streamer(), max_new_tokens=5)


def test_a_streamer_that_returns_nonsense_is_an_error(pipe):
    with pytest.raises(GenerationConfigError) as error:
        pipe.generate("hello", streamer=lambda piece: "go on", max_new_tokens=20, ignore_eos=True)
    assert "'go on'" in one_line(error)


def test_an_exception_in_a_chat_forgets_the_turn(pipe):
    def streamer(piece):
        raise Failed

    pipe.start_chat()
    with pytest.raises(Failed):
        pipe.generate("hello", streamer=streamer, max_new_tokens=20, ignore_eos=True)
    turn = pipe.generate("hello", max_new_tokens=6, ignore_eos=True)
    pipe.finish_chat()
    assert turn == pipe.generate("hello", max_new_tokens=6, ignore_eos=True)


def test_a_full_chat_is_an_error(pipe):
    pipe.start_chat()
    pipe.generate("hello", max_new_tokens=60, ignore_eos=True)
    with pytest.raises(PromptTooLongError) as error:
        pipe.generate("hello again", max_new_tokens=3)
    pipe.finish_chat()
    assert "the conversation has" in one_line(error)
    assert "start_chat" in str(error.value)


def test_a_streamer_may_call_its_own_pipeline_but_not_its_own_chat(pipe):
    inner = []
    pipe.generate(
        "hello",
        streamer=lambda piece: inner.append(pipe.generate("x", max_new_tokens=1)) and None,
        max_new_tokens=3,
        ignore_eos=True,
    )
    assert inner
    assert set(inner) == {pipe.generate("x", max_new_tokens=1)}
    for again in (lambda: pipe.generate("x", max_new_tokens=1), pipe.start_chat, pipe.finish_chat):
        pipe.start_chat()
        with pytest.raises(StaticLLMError) as error:
            pipe.generate("hello", streamer=lambda piece, again=again: again(), max_new_tokens=20, ignore_eos=True)
        pipe.finish_chat()
        assert "its streamer cannot begin another" in one_line(error)

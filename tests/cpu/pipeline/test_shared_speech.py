"""Tests speech on the engine of a chat: both give what they give alone, and each may fail or end before the other."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor
from itertools import pairwise

import pytest
from support.encoders.encoder_models import encoder_directory
from support.engine.held_engine import hold
from support.helpers import one_line
from support.models.whisper_directory import RATE, sound, write_whisper

from staticllm import StaticEmbeddingPipeline, StaticLLMPipeline, StaticWhisperPipeline, demo_model_path
from staticllm.errors import ClosedError, ConfigError, DeviceError
from staticllm.pipelines.engine.job_engine import JobEngine
from tests.support.inside import speech_of

pytestmark = pytest.mark.usefixtures("shared_programs")

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
PROMPTS = ["Tell me a story", "Once upon a time there was a fox", "The sun"]
SECONDS = 60
RECORDINGS = [sound(seconds, number) for number, seconds in enumerate((0.8, 3.5, 2.5, 1.7))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"), num_layers=3)


@pytest.fixture(scope="module")
def llm():
    with StaticLLMPipeline(demo_model_path(), "CPU", **F32) as found:
        yield found


@pytest.fixture
def speech(directory, llm):
    with StaticWhisperPipeline(directory, engine=llm.engine, **F32) as found:
        yield found


@pytest.fixture(scope="module")
def expected(directory):
    with StaticWhisperPipeline(directory, **F32) as alone:
        texts = [str(alone.generate(samples)) for samples in RECORDINGS]
    assert all(texts)
    return texts


def texts_of(pipe, **options):
    handles = [pipe.submit(samples, **options) for samples in RECORDINGS]
    return [str(handle.result(SECONDS)) for handle in handles]


@pytest.mark.parametrize("priority", [0, -1])
def test_chats_and_transcriptions_give_what_they_give_alone(llm, speech, expected, priority):
    answers = [str(llm.generate(prompt, max_new_tokens=40)) for prompt in PROMPTS]
    with llm.record() as trace, ThreadPoolExecutor(4) as pool:
        chats = [pool.submit(lambda p=prompt: str(llm.generate(p, max_new_tokens=40))) for prompt in PROMPTS]
        assert texts_of(speech, priority=priority) == expected
        assert [chat.result(SECONDS) for chat in chats] == answers
    calls = sorted([*trace.steps, *trace.jobs], key=lambda call: call.start)
    assert all(first.end <= second.start for first, second in pairwise(calls)), "two calls at once"
    num_windows = sum(-(-len(samples) // RATE) for samples in RECORDINGS)
    assert len(trace.jobs) >= speech.stats().num_steps + num_windows - 4, (
        "steps and windows are jobs of the chat's engine"
    )
    assert speech.engine.step_host.host is llm.engine


def test_four_recordings_at_once_are_decoded_in_the_same_calls(directory):
    """Each has four windows at least, and all that wait are heard before the next step."""
    recordings = [sound(3.5, number) for number in range(4)]
    with StaticWhisperPipeline(directory, **F32) as pipe:
        texts = [str(pipe.generate(samples, language="<|en|>")) for samples in recordings]
        runner, all_wait = pipe.engine.runner, threading.Event()
        encode = speech_of(pipe).windows.runner.run_blocks
        speech_of(pipe).windows.runner.run_blocks = lambda *rest: (all_wait.wait(SECONDS), encode(*rest))[1]
        with pipe.engine.record() as trace:
            handles = [pipe.submit(samples, language="<|en|>") for samples in recordings]
            while len(speech_of(pipe).windows.waiting) < 3:
                time.sleep(0.001)
            all_wait.set()
            assert [str(handle.result(SECONDS)) for handle in handles] == texts
    assert runner.cache.cross.num_cross_windows == 4
    counts = [len(step.decode) + len(step.prefill) for step in trace.steps]
    assert sum(counts) / len(counts) > 3
    assert max(counts) == 4


def test_a_chat_decodes_between_two_blocks_of_the_encoder(llm, speech, expected, monkeypatch):
    """A call is said to take half a second, so that no job holds two of its blocks."""
    answer = str(llm.generate(PROMPTS[0], max_new_tokens=40))
    runner = speech_of(speech).windows.runner
    assert runner.num_blocks > 2
    monkeypatch.setattr(runner.costs, "update", lambda variant, seconds: None)
    runner.costs.set(runner.variant, 0.5)
    first_block, goes_on = threading.Event(), threading.Event()
    encode, begins = runner.run_blocks, []

    def noted(features, blocks, meanwhile):
        begins.append((blocks, llm.stats().num_steps))
        encode(features, blocks, meanwhile)
        first_block.set()
        assert goes_on.wait(SECONDS)

    monkeypatch.setattr(runner, "run_blocks", noted)
    handle = speech.submit(RECORDINGS[0], language="<|en|>")
    assert first_block.wait(SECONDS)
    chat = llm.submit(PROMPTS[0], max_new_tokens=40)
    goes_on.set()
    assert str(handle.result(SECONDS)) == expected[0]
    assert str(chat.result(SECONDS)) == answer
    assert [blocks for blocks, _ in begins] == [range(block, block + 1) for block in range(runner.num_blocks)]
    assert begins[-1][1] > begins[0][1], "steps of the chat ran between two blocks"


def test_a_recording_is_given_up_between_two_blocks(speech, expected, monkeypatch):
    runner = speech_of(speech).windows.runner
    runner.costs.set(runner.variant, 0.5)
    is_submitted = threading.Event()
    handles, begins = [], []
    encode = runner.run_blocks

    def cancel(features, blocks, meanwhile):
        begins.append((features.tobytes(), blocks))
        encode(features, blocks, meanwhile)
        assert is_submitted.wait(SECONDS)
        handles[0].cancel()

    monkeypatch.setattr(runner, "run_blocks", cancel)
    handles.append(speech.submit(sound(0.9, 99)))
    is_submitted.set()
    with pytest.raises(CancelledError):
        handles[0].result(SECONDS)
    assert texts_of(speech) == expected
    first, _ = begins[0]
    assert [blocks for each, blocks in begins if each == first] == [range(1)], "no more blocks of what was given up"


@pytest.mark.parametrize(("options", "in_blocks"), [({}, True), ({"PROGRAMS": "shared"}, False)])
def test_an_encoder_on_a_shared_engine_runs_in_blocks_unless_the_user_chose(directory, llm, options, in_blocks):
    with StaticWhisperPipeline(directory, engine=llm.engine, **options, **F32) as speech:
        assert (speech_of(speech).windows.runner.num_blocks > 1) is in_blocks
        assert sum(speech_of(speech).windows.runner.block_costs) == pytest.approx(speech_of(speech).windows.runner.cost)
    with StaticWhisperPipeline(directory, **options, **F32) as alone:
        assert speech_of(alone).windows.runner.num_blocks == 1


def test_a_closed_pipeline_is_gone_without_the_garbage_collector(directory):
    """Its tokenizer has threads of OpenVINO, which end with it."""
    gc.collect()
    gc.disable()
    try:
        with StaticWhisperPipeline(directory, **F32) as speech:
            speech.generate(RECORDINGS[0])
        found = weakref.ref(speech)
        del speech
        assert found() is None
    finally:
        gc.enable()


def test_an_engine_for_jobs_alone_gives_the_same(directory, expected):
    engine = JobEngine()
    with StaticWhisperPipeline(directory, engine=engine, **F32) as speech:
        assert texts_of(speech) == expected
        speech.engine.run_between_steps(lambda: None)
        assert speech.engine.is_idle
    engine.close()


def test_what_joins_the_engine_of_the_speech_runs_in_that_of_the_chat(directory, tmp_path, llm, speech, expected):
    encoder = encoder_directory(tmp_path)
    with StaticEmbeddingPipeline(encoder, "CPU", engine=speech.engine, **F32) as embedder:
        before = llm.stats().num_jobs
        assert len(embedder.embed_query("first")) == embedder.width
        assert llm.stats().num_jobs == before + 1
    assert texts_of(speech) == expected


def test_closing_the_speech_leaves_the_chat(directory, llm):
    speech = StaticWhisperPipeline(directory, engine=llm.engine, **F32)
    is_free, holding = hold(llm)
    waiting = [speech.submit(samples) for samples in RECORDINGS]
    speech.close()
    speech.close()
    is_free.set()
    holding.join(SECONDS)
    for handle in waiting:
        with pytest.raises(ClosedError):
            handle.result(SECONDS)
    with pytest.raises(ClosedError) as caught:
        speech.generate(RECORDINGS[0])
    assert one_line(caught)
    assert str(llm.generate(PROMPTS[0], max_new_tokens=5))
    assert llm.engine.is_idle


def test_closing_the_chat_ends_the_speech(directory, expected):
    llm = StaticLLMPipeline(demo_model_path(), "CPU", **F32)
    speech = StaticWhisperPipeline(directory, engine=llm.engine, **F32)
    assert str(speech.generate(RECORDINGS[0])) == expected[0]
    handles = []

    def close(text):
        if not handles:
            handles.extend(speech.submit(samples) for samples in RECORDINGS * 4)
            llm.close()
        return False

    llm.generate(PROMPTS[0], streamer=close, max_new_tokens=40)
    for number, handle in enumerate(handles):
        with contextlib.suppress(ClosedError):
            assert str(handle.result(SECONDS)) == expected[number % 4], "a text that is not whole"
    with pytest.raises(ClosedError) as caught:
        speech.generate(RECORDINGS[0])
    assert one_line(caught)
    speech.close()
    with pytest.raises(ClosedError):
        StaticWhisperPipeline(directory, engine=llm.engine, **F32)


@pytest.mark.parametrize("is_shared", [True, False])
def test_what_is_closed_in_the_middle_of_its_last_window_gives_no_half_text(directory, llm, is_shared, monkeypatch):
    options = {"engine": llm.engine} if is_shared else {}
    speech = StaticWhisperPipeline(directory, **options, **F32)
    runner = speech.engine.runner
    run, begun, goes_on = runner.run, threading.Event(), threading.Event()

    def wait(*arguments, **options):
        begun.set()
        assert goes_on.wait(SECONDS)
        return run(*arguments, **options)

    monkeypatch.setattr(runner, "run", wait)
    handle = speech.submit(RECORDINGS[0], language="<|en|>")
    assert begun.wait(SECONDS)
    closing = threading.Thread(target=speech.close)
    closing.start()
    while not speech.engine.step_host.is_closing:
        time.sleep(0.001)
    goes_on.set()
    with pytest.raises(ClosedError):
        handle.result(SECONDS)
    closing.join(SECONDS)
    assert not closing.is_alive()


def test_an_error_in_a_step_of_the_speech_ends_its_requests_alone(llm, speech, expected, monkeypatch):
    answer = str(llm.generate(PROMPTS[0], max_new_tokens=40))
    runner = speech.engine.runner
    run, broken = runner.run, DeviceError("broken")

    def fail(*arguments, **options):
        raise broken

    monkeypatch.setattr(runner, "run", fail)
    chat = llm.submit(PROMPTS[0], max_new_tokens=40)
    with pytest.raises(DeviceError, match="broken"):
        speech.generate(RECORDINGS[1])
    assert str(chat.result(SECONDS)) == answer
    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(speech.engine.core.planner, "plan", lambda view: 1 / 0)  # a bug of ours
    with pytest.raises(Exception, match="division by zero"):
        speech.generate(RECORDINGS[1])
    monkeypatch.undo()
    assert texts_of(speech) == expected
    assert str(llm.generate(PROMPTS[0], max_new_tokens=40)) == answer


def test_an_error_in_a_step_of_the_chat_leaves_the_speech(llm, speech, expected, monkeypatch):
    handles = [speech.submit(samples) for samples in RECORDINGS]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", lambda *arguments, **options: 1 / 0)
        with pytest.raises(Exception, match="division by zero"):
            llm.generate(PROMPTS[0], max_new_tokens=40)
    assert [str(handle.result(SECONDS)) for handle in handles] == expected
    assert str(llm.generate(PROMPTS[0], max_new_tokens=5))


def test_ctrl_c_in_a_streamer_leaves_both(llm, speech, expected):
    def interrupt(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        speech.generate(RECORDINGS[1], streamer=interrupt)
    assert texts_of(speech) == expected
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[0], streamer=interrupt, max_new_tokens=40)
    assert texts_of(speech) == expected
    speech.engine.run_between_steps(lambda: None)
    assert speech.engine.runner.cache.cross.num_free == speech.num_windows


def test_a_deleted_pipeline_leaves_the_engine(directory, llm):
    shared = StaticWhisperPipeline(directory, engine=llm.engine, **F32)
    assert str(shared.generate(RECORDINGS[0]))
    engine = weakref.ref(shared.engine)
    del shared
    until = time.monotonic() + SECONDS
    while engine() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert engine() is None, "the chat's engine keeps the model"
    assert str(llm.generate(PROMPTS[0], max_new_tokens=5))


@pytest.mark.parametrize("engine", ["llm", object()])
def test_what_is_no_engine_is_refused_in_one_line(directory, engine):
    with pytest.raises(ConfigError, match=r"engine=llm\.engine") as caught:
        StaticWhisperPipeline(directory, engine=engine, **F32)
    assert one_line(caught)

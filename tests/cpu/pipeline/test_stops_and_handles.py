"""Tests stop strings, which are found on the reader's side, and the lifetime of handles."""

import asyncio
import gc
import threading
import time

import pytest
from support.attach.daemons import wait_for

from staticllm import BusyError, ClosedError, GenerationConfigError, StaticLLMPipeline, demo_model_path
from staticllm.pipelines.text.detokenizer import IncrementalDetokenizer

pytestmark = pytest.mark.usefixtures("shared_programs")

SMALL = {
    "MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 448, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32",
}  # fmt: skip


def new_pipe(**properties):
    return StaticLLMPipeline(demo_model_path(), "CPU", **SMALL, **properties)


@pytest.fixture(scope="module")
def pipe():
    with new_pipe() as pipe:
        yield pipe


@pytest.fixture
def broken_device(pipe, monkeypatch):
    """Return an event; once it is set, the device fails."""
    broken = threading.Event()
    for program in pipe.engine.runner.programs.values():

        def run(meanwhile=None, run=program.run):
            seconds = run(meanwhile)
            time.sleep(0.02)
            if broken.is_set():
                raise RuntimeError("device lost")
            return seconds

        monkeypatch.setattr(program, "run", run)
    return broken


class Tokenizer:
    """Wraps the tokenizer of a pipeline and replaces its ``decode``."""

    def __init__(self, tokenizer, decode):
        self._tokenizer, self.decode = tokenizer, decode

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def test_a_handle_keeps_its_pipeline_alive():
    handle = new_pipe().submit("hello", max_new_tokens=100, ignore_eos=True)
    gc.collect()
    handle.result()
    assert handle.finish_reason == "length"


def test_a_pipeline_that_is_awaited_in_one_line_answers():
    async def answer():
        return await new_pipe().submit("hello", max_new_tokens=60, ignore_eos=True)

    assert len(asyncio.run(answer()).tokens[0]) == 60


@pytest.mark.slow
def test_a_callback_keeps_its_pipeline_alive(pipe):
    texts = []
    new_pipe().submit("hello", max_new_tokens=300, ignore_eos=True, callback=texts.append)._thread.join(60)
    assert "".join(texts) == pipe.generate("hello", max_new_tokens=300, ignore_eos=True)


def test_a_device_that_fails_after_the_stop_string_does_not_spoil_the_answer(pipe, broken_device, monkeypatch):
    whole = str(pipe.generate("hello", max_new_tokens=60, ignore_eos=True))
    stop, push = whole[10:14], IncrementalDetokenizer.push

    def pushed(self, token):
        text = push(self, token)
        if self.is_stopped:
            broken_device.set()
            time.sleep(0.2)
        return text

    monkeypatch.setattr(IncrementalDetokenizer, "push", pushed)
    assert pipe.generate("hello", max_new_tokens=60, ignore_eos=True, stop_strings={stop}) == whole[: whole.index(stop)]


def test_a_device_that_fails_after_the_streamer_has_stopped_does_not_spoil_the_answer(pipe, broken_device):
    def streamer(text):
        broken_device.set()
        time.sleep(0.2)
        return True

    assert pipe.generate("hello", max_new_tokens=60, ignore_eos=True, streamer=streamer)


def test_a_streamer_that_stops_does_not_wait_for_the_device(pipe, monkeypatch):
    stopped = []
    for program in pipe.engine.runner.programs.values():

        def run(meanwhile=None, run=program.run):
            seconds = run(meanwhile)
            time.sleep(0.5)
            return seconds

        monkeypatch.setattr(program, "run", run)

    def streamer(text):
        stopped.append(time.monotonic())
        return True

    pipe.generate("hello", max_new_tokens=60, ignore_eos=True, streamer=streamer)
    assert time.monotonic() - stopped[0] < 0.25


def test_a_decode_that_fails_in_the_stop_checker_only_spoils_no_answer(pipe, monkeypatch):
    failed, push = threading.Event(), IncrementalDetokenizer.push

    def failing(detokenizer, token):
        if threading.current_thread().name == "staticllm-stop-checker" and len(detokenizer.text) > 8:
            failed.set()
            raise RuntimeError("no memory")
        return push(detokenizer, token)

    monkeypatch.setattr(IncrementalDetokenizer, "push", failing)
    handle = pipe.submit("hello", max_new_tokens=200, ignore_eos=True, stop_strings={"zzzz"})
    assert failed.wait(30)
    monkeypatch.undo()
    assert handle.result() == pipe.generate("hello", max_new_tokens=200, ignore_eos=True), "the reader decides"


def test_a_refused_request_leaves_nothing_behind():
    with new_pipe(MAX_WAITING=1) as pipe:
        handles, num_refused = [], 0
        for _ in range(20):
            try:
                handles.append(pipe.submit("hello", max_new_tokens=200, ignore_eos=True, stop_strings={"zzzz"}))
            except BusyError:
                num_refused += 1
        for handle in handles:
            handle.cancel()
            handle.result()
        assert num_refused
        wait_for(lambda: not pipe._stop_checker._watched)


def test_a_closed_pipeline_starts_no_thread():
    pipe = new_pipe()
    pipe.close()
    before = set(threading.enumerate())
    with pytest.raises(ClosedError):
        pipe.submit("hello", stop_strings={"zzzz"})
    assert not [thread.name for thread in set(threading.enumerate()) - before]


def test_a_callback_for_several_answers_is_refused_at_once(pipe):
    with pytest.raises(GenerationConfigError):
        pipe.submit("hello", max_new_tokens=4, num_return_sequences=2, do_sample=True, callback=print)

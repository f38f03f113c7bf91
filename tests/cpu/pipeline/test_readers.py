"""Tests reading an answer: from several threads, callbacks, an event loop, or a forked child."""

import asyncio
import gc
import os
import queue
import threading
import time

import pytest
from support.attach.daemons import wait_for

from staticllm import ClosedError, GenerationConfigError, StaticLLMError, StaticLLMPipeline, demo_model_path
from staticllm.core import FinishReason
from staticllm.pipelines.engine.request import Finished
from staticllm.pipelines.text import answer_reader
from staticllm.pipelines.text.readers import OutputSignal
from tests.support.inside import reader_of

pytestmark = pytest.mark.usefixtures("shared_programs")

SMALL = {"MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 192, "INFERENCE_PRECISION_HINT": "f32"}
LONG = {"max_new_tokens": 190, "ignore_eos": True}


@pytest.fixture(scope="module")
def pipe():
    with StaticLLMPipeline(demo_model_path(), "CPU", **SMALL) as pipe:
        yield pipe


def in_thread(function):
    """Run a function in a thread of its own, and return its result and its exception."""
    results = queue.SimpleQueue()

    def run():
        try:
            results.put((function(), None))
        except BaseException as error:
            results.put((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return results.get(timeout=0)


def test_result_times_out_while_another_thread_is_reading(pipe):
    handle = pipe.submit("hello", **LONG)
    pieces = iter(handle)
    next(pieces)
    start = time.monotonic()
    _, error = in_thread(lambda: handle.result(timeout=0.2))
    assert isinstance(error, TimeoutError)
    assert "another thread is reading" in str(error)
    assert time.monotonic() - start < 5
    assert "".join(pieces), "the reader got no more text"
    assert len(handle.result().tokens[0]) == 190, "the reader lost tokens"


def test_the_echo_comes_after_the_checks_of_its_reader(pipe):
    handle = pipe.submit("hello", max_new_tokens=20, ignore_eos=True, echo=True)
    answers = queue.SimpleQueue()
    token = object()
    assert reader_of(handle).role.enter(token), "a reader such as ``result``, which leaves the echo"
    thread = threading.Thread(target=lambda: answers.put("".join(handle)))
    thread.start()
    time.sleep(0.2)
    assert reader_of(handle).first is not None, "a reader that waits for its turn has taken nothing"
    reader_of(handle).role.leave(token)
    thread.join(30)
    assert answers.get(timeout=0).startswith("hello")


def test_a_thread_that_may_not_wait_gets_no_echo(pipe, monkeypatch):
    def refuse():
        raise StaticLLMError("this thread may not wait")

    handle = pipe.submit("hello", max_new_tokens=20, ignore_eos=True, echo=True)
    with monkeypatch.context() as patch:
        patch.setattr(answer_reader, "check_may_wait", refuse)
        with pytest.raises(StaticLLMError, match="may not wait"):
            next(handle.deltas())
    with monkeypatch.context() as patch:
        patch.setattr(reader_of(handle), "pid", -1)
        with pytest.raises(StaticLLMError):
            next(handle.deltas())
    assert "".join(handle).startswith("hello")


def test_an_iterator_can_be_dropped_in_another_thread(pipe, recwarn):
    handle = pipe.submit("hello", max_new_tokens=20, ignore_eos=True)
    held = [iter(handle)]
    next(held[0])

    def drop():
        held.clear()
        gc.collect()
        return handle.result(timeout=30)

    result, error = in_thread(drop)
    assert error is None
    assert len(result.tokens[0]) == 20
    assert not [w for w in recwarn if "Unraisable" in w.category.__name__]


def test_an_iterator_can_continue_in_another_thread(pipe):
    handle = pipe.submit("hello", max_new_tokens=20, ignore_eos=True)
    pieces, _ = in_thread(lambda: (it := iter(handle), next(it))[0])
    second, _ = in_thread(lambda: next(pieces))
    assert second
    assert len(handle.result(timeout=30).tokens[0]) == 20
    assert list(pieces) == []


@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), ZeroDivisionError("mine")]
)
def test_an_exception_in_a_callback_ends_the_request_and_reaches_result(pipe, error):
    def callback(text):
        raise error

    handle = pipe.submit("hello", **LONG, callback=callback)
    with pytest.raises(type(error)):
        handle.result(timeout=30)
    wait_until_idle(pipe)
    assert handle.finish_reason == "error"


def wait_until_idle(pipe):
    wait_for(lambda: pipe.engine.run_between_steps(lambda: pipe.engine.is_idle), 10)


def test_async_for_and_await_give_the_answer_of_generate(pipe):
    async def main():
        handle = pipe.submit("hello", max_new_tokens=6, echo=True)
        pieces = [piece async for piece in handle]
        return pieces, handle.result(), await pipe.submit("hello", max_new_tokens=6, echo=True)

    pieces, result, awaited = asyncio.run(main())
    expected = pipe.generate("hello", max_new_tokens=6, echo=True)
    assert len(expected.tokens[0]) == 6
    assert len(expected) > len(pipe.generate("hello", max_new_tokens=6))
    assert "".join(pieces) == result == awaited == expected


def test_a_cancelled_await_cancels_the_request(pipe):
    async def main():
        handle = pipe.submit("hello", **LONG)
        task = asyncio.ensure_future(handle)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until_idle(pipe)


def test_an_async_reader_ends_when_another_thread_stops_the_request(pipe, monkeypatch):
    """``stop`` records the end at the worst moment: the signal of the last output was cleared, and nothing was taken yet."""
    clear = OutputSignal.clear

    def stopped(signal):
        clear(signal)
        reader_of(handle)._close(Finished(FinishReason.CANCELLED))

    async def main():
        batches = handle.batches_async()
        await anext(batches)
        handle.cancel()
        waiting = reader_of(handle).queue.outputs
        while not (waiting and isinstance(waiting[-1], Finished)):
            await asyncio.sleep(0.01)
        monkeypatch.setattr(OutputSignal, "clear", stopped)
        await asyncio.wait_for(anext(batches, None), 20)

    handle = pipe.submit("hello", **LONG)
    asyncio.run(main())
    assert handle.finish_reason == FinishReason.CANCELLED


def test_await_raises_the_error_of_the_request(pipe):
    async def main():
        return await pipe.submit("hello", max_new_tokens=4, min_new_tokens=4, stop_token_ids=set(range(100_000)))

    with pytest.raises(GenerationConfigError, match="no token can be chosen"):
        asyncio.run(main())


def test_two_readers_at_once_are_refused_in_an_event_loop(pipe):
    handle = pipe.submit("hello", **LONG)
    pieces = iter(handle)
    next(pieces)

    async def read():
        return await handle

    _, error = in_thread(lambda: asyncio.run(read()))
    assert isinstance(error, StaticLLMError)
    assert "one reader at a time" in str(error)
    handle.cancel()


def test_two_tasks_reading_one_handle_are_refused_without_hanging(pipe):
    async def main():
        handle = pipe.submit("hello", **LONG)

        async def read():
            return await handle

        first, second = asyncio.create_task(read()), asyncio.create_task(read())
        return await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 60)

    first, second = asyncio.run(main())
    assert len(first.tokens[0]) == 190
    assert "one reader at a time" in str(second)


def test_a_finished_answer_can_be_read_from_any_thread(pipe):
    handle = pipe.submit("hello", max_new_tokens=8, ignore_eos=True)
    held, _ = in_thread(lambda: (it := iter(handle), next(it))[0])  # the thread has ended, but not the iterator
    first = handle.result(timeout=30)
    second, error = in_thread(lambda: handle.result(timeout=5))
    assert error is None
    assert second == first
    assert held is not None


def test_a_request_with_a_callback_can_be_awaited(pipe):
    seen = []

    async def main():
        return await pipe.submit("hello", max_new_tokens=8, ignore_eos=True, callback=seen.append)

    assert asyncio.run(main()) == "".join(seen)
    with pytest.raises(GenerationConfigError, match="callback is a int"):
        pipe.submit("hello", callback=1)


# -- where no thread can be had


def test_a_thread_that_cannot_start_fails_only_one_call(monkeypatch):
    with StaticLLMPipeline(demo_model_path(), "CPU", **SMALL) as pipe:
        start = threading.Thread.start

        def fail(thread):
            if thread.name.startswith("staticllm"):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", fail)
        for call in (pipe.generate, pipe.submit):
            with pytest.raises(StaticLLMError, match="'staticllm-engine' cannot be started beside"):
                call("hello", max_new_tokens=2)
        monkeypatch.undo()
        assert pipe.generate("hello", max_new_tokens=2)
        monkeypatch.setattr(threading.Thread, "start", fail)
        with pytest.raises(StaticLLMError, match="'staticllm-callback' cannot be started"):
            pipe.submit("hello", **LONG, callback=lambda text: None)
        monkeypatch.undo()
        wait_until_idle(pipe)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_continues():
    with StaticLLMPipeline(demo_model_path(), "CPU", **SMALL) as pipe:
        handle = pipe.submit("hello", **LONG)
        next(iter(handle))
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            said = []
            for call in (
                lambda: pipe.generate("hello"),
                lambda: pipe.submit("hello"),
                lambda: pipe.start_chat() or pipe.generate("hello"),
                lambda: handle.result(timeout=5),
                pipe.close,
            ):
                try:
                    call()
                    said.append("done")
                except BaseException as error:
                    said.append(type(error).__name__ + " " + str(error))
            os.write(writer, "\n".join(said).encode())
            os._exit(0)
        os.close(writer)
        try:
            assert len(handle.result(timeout=60).tokens[0]) == 190
            wait_for(lambda: os.waitpid(child, os.WNOHANG) != (0, 0), 30)
        finally:
            with os.fdopen(reader, encoding="utf-8") as file:
                said = file.read().split("\n")
        assert len(said) == 5
        assert said[-1] == "done"
        for line in said[:4]:
            assert line.startswith("ClosedError the pipeline was loaded in process")
            assert "spawn" in line
        assert pipe.generate("hello", max_new_tokens=2)
    with pytest.raises(ClosedError, match="is closed"):
        pipe.generate("hello")

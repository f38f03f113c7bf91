"""Tests faults of jobs on engines: closing at any moment, drains on the engine's own thread, 200 threads, and broken sources."""

import threading
import time
import warnings
from concurrent.futures import CancelledError

import pytest
from support.encoders.fake_encoders import POISON, Adder, request

from staticllm.errors import BusyError, ClosedError, DeviceError, NumericalError, StaticLLMError
from staticllm.pipelines.embedding.queue.drivers import JobDriver
from staticllm.pipelines.engine.job_engine import JobEngine
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.testing import fake_answer, fake_engine, fake_request, run_to_end

SECONDS = 20
PROMPT = list(range(2, 30))


def engines():
    return fake_engine(make_policy("dynamic")), JobEngine()


def queue_on(engine, max_waiting=10_000):
    queue = JobDriver(Adder(), max_waiting)
    engine.add_jobs(queue)
    return queue


def submitted(queue, *ids, **options):
    mine = request(*ids, **options)
    queue.submit(mine)
    return mine


class Gate:
    """Holds the calls of a queue's device until it is opened."""

    def __init__(self, queue):
        self.begun, self.may_go_on, self._run = threading.Event(), threading.Event(), queue.runner.run
        queue.runner.run = self.run

    def run(self, *given):
        self.begun.set()
        assert self.may_go_on.wait(SECONDS)
        return self._run(*given)


@pytest.mark.parametrize("engine", engines(), ids=["with requests", "jobs only"])
def test_a_text_that_is_refused_by_a_closing_engine_does_not_run(engine):
    queue = queue_on(engine)
    gate = Gate(queue)
    running = submitted(queue, 1)
    assert gate.begun.wait(SECONDS)
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not getattr(engine, "step_host", engine).is_closing:
        time.sleep(0.001)
    late = request(2)
    with pytest.raises(ClosedError):
        queue.submit(late)
    with pytest.raises(CancelledError):
        late.future.result(0)
    gate.may_go_on.set()
    closing.join(SECONDS)
    assert running.future.result(0).tolist() == [[8, 8]]
    assert queue.runner.calls == [[1]]
    assert not queue.has_jobs


def test_draining_on_the_thread_of_the_engine_runs_what_waits():
    engine = fake_engine(make_policy("dynamic"))
    queue = queue_on(engine)
    gate = Gate(queue)
    first = submitted(queue, 1)
    assert gate.begun.wait(SECONDS)
    texts = [submitted(queue, i, length=60) for i in range(20, 60)]
    chat = fake_request(PROMPT, 12)
    engine.submit_state(chat)
    caller = threading.Thread(target=engine.run_between_steps, args=(lambda: engine.close(drain=True),))
    caller.start()
    gate.may_go_on.set()
    caller.join(SECONDS)
    assert not caller.is_alive()
    for each in (first, *texts):
        assert each.future.result(SECONDS).shape == (1, 2)
    engine.close()
    assert chat.tokens == fake_answer(PROMPT, 12)
    with pytest.raises(ClosedError):
        queue.submit(request(3))


@pytest.mark.parametrize("drain", [True, False])
def test_closing_while_a_job_runs_leaves_no_text_without_an_end(drain):
    for engine in (fake_engine(make_policy("dynamic")), JobEngine()):
        queue = queue_on(engine)
        gate = Gate(queue)
        texts = [submitted(queue, i, length=60) for i in range(20, 40)]
        assert gate.begun.wait(SECONDS)
        closing = threading.Thread(target=engine.close, args=(drain,) if hasattr(engine, "submit") else ())
        closing.start()
        gate.may_go_on.set()
        closing.join(SECONDS)
        assert all(each.future.done() for each in texts)
        ends = [each.future.exception() for each in texts]
        assert all(end is None or isinstance(end, ClosedError) for end in ends)
        assert ends[0] is None
        if drain and hasattr(engine, "submit"):
            assert ends == [None] * 20


def test_two_hundred_threads_share_an_engine_with_chats():
    engine = fake_engine(make_policy("dynamic"))
    queue = queue_on(engine, max_waiting=400)
    wrong, kinds = [], []

    def embed(number):
        for count in range(5):
            priority = number % 3
            mine = request(20 + number, length=1 + (number + count) % 60, priority=priority)
            try:
                queue.submit(mine)
            except BusyError:
                kinds.append("busy")
                continue
            if number % 7 == 0:
                kinds.append("cancelled" if mine.future.cancel() else "done")
                continue
            ids = mine.texts[0].ids
            if mine.wait().tolist() != [[ids.sum(), len(ids)]]:
                wrong.append(number)

    chats = [fake_request(PROMPT[i:], 12) for i in range(6)]
    threads = [threading.Thread(target=embed, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    for chat in chats:
        engine.submit_state(chat)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    engine.close(drain=True)
    assert not wrong
    assert [chat.tokens for chat in chats] == [fake_answer(PROMPT[i:], 12) for i in range(6)]
    assert queue.num_waiting == 0


def test_weights_that_are_not_finite_fail_texts_and_no_request():
    engine = fake_engine(make_policy("dynamic"), starts_thread=False)
    queue = queue_on(engine)
    bad = [request(POISON, length=8) for _ in range(20)]
    for each in bad:
        queue.submit(each)
    chat = fake_request(PROMPT, 30)
    run_to_end(engine, [chat])
    while queue.has_jobs:
        engine.steps.step()
    assert chat.tokens == fake_answer(PROMPT, 30)
    assert all(isinstance(each.future.exception(0), NumericalError) for each in bad)
    engine.close()


def test_the_end_of_a_deadline_does_not_wait_for_the_turn_of_its_text():
    engine = JobEngine()
    queue = queue_on(engine)
    gate = Gate(queue)
    bulk = [submitted(queue, i, length=60) for i in range(20, 100)]
    assert gate.begun.wait(SECONDS)
    late = submitted(queue, 5, deadline=time.perf_counter() + 0.05)
    day = submitted(queue, 6, deadline=time.perf_counter() + 86400)
    num_calls = []
    late.future.add_quick_callback(lambda: num_calls.append(len(queue.runner.calls)))
    time.sleep(0.06)
    gate.may_go_on.set()
    with pytest.raises(StaticLLMError, match="deadline"):
        late.wait()
    assert num_calls == [1]
    assert day.wait().tolist() == [[48, 8]]
    assert all(each.wait().shape == (1, 2) for each in bulk)
    assert all(5 not in call for call in queue.runner.calls)
    engine.close()


def test_cancelled_texts_make_room_and_a_large_request_is_dropped_at_once():
    queue = JobDriver(Adder(), 100_000)
    large = submitted(queue, *range(90_000), length=1)
    assert queue.next_job() is not None
    with pytest.raises(BusyError):
        queue.submit(request(*range(20_000), length=1))
    assert large.future.cancel()
    fits = submitted(queue, *range(20, 99_020), length=1)
    begin = time.process_time()
    assert queue.run_next() > 0
    assert time.process_time() - begin < 0.5
    assert queue.num_waiting < 99_000
    fits.future.cancel()
    assert queue.next_job() is None
    assert queue.num_waiting == 0


class Broken(JobDriver):
    """A source that raises what is no Exception."""

    def next_job(self, max_seconds=None):
        raise SystemExit(3)


@pytest.mark.parametrize("filter", ["ignore", "error"])
@pytest.mark.parametrize("engine", engines(), ids=["with requests", "jobs only"])
def test_a_broken_source_stops_neither_the_engine_nor_other_sources(engine, filter):
    with warnings.catch_warnings():
        warnings.simplefilter(filter)
        broken, queue = Broken(Adder(), 10), queue_on(engine)
        engine.add_jobs(broken)
        lost = submitted(broken, 1)
        with pytest.raises(ClosedError):
            lost.wait()
        assert submitted(queue, 2).wait().tolist() == [[16, 8]]
    engine.remove_jobs(queue)


def test_a_device_that_fails_for_a_while_loses_only_the_texts_of_its_calls():
    engine = JobEngine()
    queue = queue_on(engine)
    queue.runner.failure = RuntimeError("device lost")
    with pytest.raises(DeviceError, match="device lost"):
        submitted(queue, 1).wait()
    queue.runner.failure = None
    assert submitted(queue, 2).wait().tolist() == [[16, 8]]
    engine.close()


def test_removing_and_closing_in_a_done_callback():
    engine = JobEngine()
    queue, ended = queue_on(engine), threading.Event()
    first, waiting = request(1, priority=1), [request(i, length=60) for i in range(20, 30)]
    first.future.add_done_callback(lambda _: (engine.remove_jobs(queue), engine.close(), ended.set()))
    for each in (*waiting, first):
        queue.submit(each)
    assert ended.wait(SECONDS)
    assert all(each.future.done() for each in waiting)


def test_jobs_go_on_while_the_engine_changes_its_runner():
    engine, switched = fake_engine(make_policy("dynamic")), threading.Event()
    queue = queue_on(engine)
    texts = [submitted(queue, i, length=60) for i in range(20, 60)]
    chat = fake_request(PROMPT, 30)
    engine.submit_state(chat)
    engine.switch(engine.runner, engine.core.device.options, switched.set)
    texts += [submitted(queue, i, length=60) for i in range(60, 100)]
    late = fake_request(PROMPT, 12)
    engine.submit_state(late)
    assert switched.wait(SECONDS)
    assert all(each.wait().shape == (1, 2) for each in texts)
    engine.close(drain=True)
    assert (chat.tokens, late.tokens) == (fake_answer(PROMPT, 30), fake_answer(PROMPT, 12))

"""Tests the queue of texts under arbitrary schedules of callers, clocks and faults: every text ends once, with its own vector."""

import random
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.encoders.fake_encoders import POISON, Adder, request, texts
from support.quick import examples

from staticllm.core import EncoderShape, EncoderVariant
from staticllm.errors import BusyError, ClosedError, DeviceError, NumericalError, StaticLLMError
from staticllm.pipelines.embedding import embedding_request, encoder_runner
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest
from staticllm.pipelines.embedding.queue import drivers
from staticllm.pipelines.embedding.queue.drivers import JobDriver
from staticllm.pipelines.engine.job_engine import JobEngine
from staticllm.pipelines.scheduling.device_share import BEHIND_SHARE

OPERATIONS = st.one_of(
    st.tuples(
        st.just("submit"),
        st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=12),
        st.integers(-1, 2),
        st.sampled_from([None, None, 0.5, 3.0]),
    ),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("run"), st.integers(1, 3)),
    st.tuples(st.just("look"), st.sampled_from([None, 0.1, 0.22, 0.3])),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 1.0])),
    st.tuples(st.just("fail"), st.booleans()),
    st.tuples(st.just("refuse"), st.booleans()),
)


class Clock:
    """Stands for ``time`` in the modules that look at the clock."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


class Schedule:
    """A queue, what was submitted to it, and what ran."""

    def __init__(self, clock, is_packable):
        runner = Adder()
        runner.shape = EncoderShape("embeddings", 2, (), 64, is_packable=is_packable)
        self.clock, self.queue, self.refuses = clock, JobDriver(runner, 60), False
        self.queue.attach(self.wake)
        self.requests, self.refused, self.next_id, self.ends = [], [], 20, Counter()

    def wake(self):
        if self.refuses:
            raise ClosedError("closing")

    def submit(self, lengths, priority, deadline):
        found = []
        for length, is_poison in lengths:
            found += texts(POISON if is_poison and length % 5 == 0 else self.next_id, length=length)
            self.next_id += 1
        deadline = None if deadline is None else self.clock.now + deadline
        mine = EmbeddingRequest(found, 2, priority, deadline, arrival=self.clock.now)
        mine.future.add_quick_callback(lambda: self.ends.update([mine.id]))
        before = self.queue.num_waiting
        try:
            self.queue.submit(mine)
            self.requests.append(mine)
        except BusyError:
            assert before + len(found) > 60
            self.refused.append(mine)
        except ClosedError:
            assert mine.future.cancelled()
            self.requests.append(mine)

    def cancel(self, number):
        if self.requests:
            self.requests[number % len(self.requests)].future.cancel()

    def run(self, count):
        for _ in range(count):
            over = {int(t.ids[0]) for r in self.requests if r.is_over or r.is_late(self.clock.now) for t in r.texts}
            num_calls, waiting = len(self.queue.runner.calls), self.queue.next_job()
            num_run = self.queue.run_next()
            calls = self.queue.runner.calls[num_calls:]
            assert len(calls) == int(num_run > 0) == int(waiting is not None)
            if calls:
                assert num_run == len(calls[0])
                assert not set(calls[0]) & (over - {POISON}), "a text ran that nobody waits for"
            self.clock.now += 0.2

    def look(self, max_seconds):
        job = self.queue.next_job(max_seconds)
        assert (job is None) is (self.queue.num_waiting == 0)
        if job is not None:
            assert job.priority == max(r.priority for r in self.requests if not r.is_over)

    def wait(self, seconds):
        self.clock.now += seconds

    def fail(self, fails):
        self.queue.runner.failure = RuntimeError("lost") if fails else None

    def refuse(self, refuses):
        self.refuses = refuses

    def check_end(self, is_closed):
        for each in self.requests:
            assert each.future.done()
            assert self.ends[each.id] == 1
            error = None if each.future.cancelled() else each.future.exception(0)
            assert error is None or isinstance(error, StaticLLMError)
            if error is None and not each.future.cancelled():
                assert each.future.result(0).tolist() == [[t.ids.sum(), len(t)] for t in each.texts]
            if isinstance(error, NumericalError):
                assert any(POISON in text.ids for text in each.texts)
            if not is_closed:
                assert not isinstance(error, ClosedError)
        for each in self.refused:
            assert each.future.cancelled()
        assert self.queue.num_waiting == 0
        assert not self.queue.has_jobs
        assert self.queue.next_job() is None
        runs = Counter(i for call in self.queue.runner.calls for i in call if i != POISON)
        assert max(runs.values(), default=0) <= 2, "once with others, and once alone"


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(OPERATIONS, max_size=40), st.booleans(), st.booleans())
def test_every_text_ends_once_with_its_own_vector(operations, is_closed, is_packable):
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drivers, "time", clock)
        patch.setattr(embedding_request, "time", clock)
        schedule = Schedule(clock, is_packable)
        for name, *values in operations:
            getattr(schedule, name)(*values)
        if is_closed:
            schedule.queue.close()
        else:
            for _ in range(1000):
                if not schedule.queue.has_jobs:
                    break
                schedule.queue.next_job()
                schedule.queue.run_next()
        schedule.check_end(is_closed)


@pytest.mark.parametrize("seconds", [0.2, 0.001])
def test_documents_run_beside_queries_that_never_end(seconds):
    queue, ids = JobDriver(Adder(), 1 << 20), iter(range(20, 1 << 20))
    costs = {variant: seconds * variant.batch for variant in Adder.variants}
    queue.runner.cost = costs.__getitem__
    bulk = request(*[next(ids) for _ in range(20)], length=60)
    lowest = request(*[next(ids) for _ in range(4)], length=60, priority=-5)
    queue.submit(bulk)
    queue.submit(lowest)
    total = spent = 0.0
    while not (bulk.future.done() and lowest.future.done()):
        queue.submit(request(next(ids), length=60, priority=1))
        job, before = queue.next_job(), bulk.num_done + lowest.num_done
        assert job.priority == 1, "queries wait for the end of each call"
        queue.run_next()
        total += job.seconds
        spent += job.seconds if bulk.num_done + lowest.num_done > before else 0.0
        assert total < 100 * 12 * seconds
    assert spent / total == pytest.approx(BEHIND_SHARE, rel=0.25)
    queue.close()


def test_a_lower_priority_waits_without_planning_until_its_turn(monkeypatch):
    planned, original = [], encoder_runner.plan_calls
    monkeypatch.setattr(
        encoder_runner, "plan_calls", lambda lengths, *given: planned.append(len(lengths)) or original(lengths, *given)
    )
    queue = JobDriver(Adder(), 1 << 20)
    queue.submit(request(*range(20, 500), length=60))
    for number in range(5):
        queue.submit(request(1000 + number, priority=1))
        queue.run_next()
    assert max(planned) <= 5


def test_a_smaller_limit_plans_again_and_costs_that_fluctuate_do_not(monkeypatch):
    planned, original = [], encoder_runner.plan_calls
    monkeypatch.setattr(
        encoder_runner, "plan_calls", lambda lengths, *given: planned.append(len(lengths)) or original(lengths, *given)
    )
    queue = JobDriver(Adder(), 1000)
    small, large = Adder.variants
    queue.submit(request(*range(20, 60), length=12))
    assert queue.next_job().seconds == pytest.approx(queue.runner.cost(large))
    assert queue.next_job(0.25).seconds == pytest.approx(queue.runner.cost(small))
    assert queue.next_job(0.33).seconds == pytest.approx(queue.runner.cost(large))
    num_planned = len(planned)
    for limit in (0.32, 0.3, 0.33, 0.31):  # the cost of the large one is 0.328
        assert queue.next_job(limit).seconds == pytest.approx(queue.runner.cost(large))
    assert len(planned) == num_planned


def test_only_texts_that_need_it_run_longer_than_the_limit():
    queue = JobDriver(Adder(), 1000)
    queue.runner.variants = (*Adder.variants, EncoderVariant(1, 48, 8))
    queue.runner.cost = {Adder.variants[0]: 0.1, Adder.variants[1]: 0.11, queue.runner.variants[2]: 0.3}.__getitem__
    queue.submit(request(*range(20, 40), length=12))
    queue.submit(request(40, length=40))
    seconds = []
    while (job := queue.next_job(0.1)) is not None:
        seconds.append(job.seconds)
        queue.run_next()
    assert sorted(set(seconds)) == [0.1, 0.11]
    assert seconds.count(0.11) == 1
    assert sum(40 in call for call in queue.runner.calls) == 1


def test_threads_that_submit_cancel_and_close_at_random_moments_lose_no_text():
    for seed in range(4):
        engine, queue, requests = JobEngine(), JobDriver(Adder(), 2000), []
        engine.add_jobs(queue)

        def serve(number, queue=queue, requests=requests, seed=seed):
            rng = random.Random(100 * seed + number)
            for _ in range(20):
                deadline = time.perf_counter() + 0.002 if rng.random() < 0.2 else None
                ids = [rng.choice((POISON, number + 20, number + 20)) for _ in range(rng.randint(1, 5))]
                mine = request(*ids, length=rng.randint(1, 60), priority=rng.randint(0, 2), deadline=deadline)
                try:
                    queue.submit(mine)
                except ClosedError:
                    return
                requests.append(mine)
                if rng.random() < 0.3:
                    time.sleep(rng.random() * 0.002)
                    mine.future.cancel()

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        time.sleep(0.05 * seed)
        engine.close()
        for thread in threads:
            thread.join(20)
        assert requests
        for mine in requests:
            try:
                assert mine.future.result(5).tolist() == [[t.ids.sum(), len(t)] for t in mine.texts]
            except (CancelledError, ClosedError, NumericalError):
                continue
            except StaticLLMError as error:
                assert not isinstance(error, DeviceError), error
        assert not queue.has_jobs


def test_equal_requests_are_not_the_same():
    first, second = request(1), request(1)
    assert first != second
    assert np.array_equal(first.vectors, second.vectors)

"""Tests the queue of texts with a device that only adds up ids: order, deadlines, errors, and no lost text."""

import threading
import time
from concurrent.futures import CancelledError, wait

import pytest
from support.encoders.fake_encoders import POISON, Adder, request

from staticllm.errors import BusyError, ClosedError, DeviceError, NumericalError, StaticLLMError
from staticllm.pipelines.embedding import encoder_runner
from staticllm.pipelines.embedding.queue.drivers import JobDriver
from staticllm.pipelines.engine.job_engine import JobEngine
from staticllm.pipelines.scheduling.interface import JobView


def run_all(queue):
    while queue.run_next():
        pass
    assert queue.num_waiting == 0
    assert queue.next_job() is None


def test_requests_share_calls_and_get_their_own_vectors():
    queue = JobDriver(Adder(), 100)
    first, second = request(1, 2, 3), request(4, 5, length=3)
    queue.submit(first)
    queue.submit(second)
    run_all(queue)
    assert first.future.result().tolist() == [[8, 8], [16, 8], [24, 8]]
    assert second.future.result().tolist() == [[12, 3], [15, 3]]
    assert len(queue.runner.calls) == 1


def test_a_higher_priority_overtakes_what_was_planned():
    queue = JobDriver(Adder(), 10_000)
    bulk = request(*range(20, 100), length=60)
    queue.submit(bulk)
    assert queue.run_next()
    query = request(7, priority=1)
    queue.submit(query)
    assert queue.next_job() == JobView(queue.id, pytest.approx(0.216), query.arrival, 1)
    assert queue.run_next()
    assert query.future.result().tolist() == [[56, 8]]
    assert not bulk.future.done()
    run_all(queue)
    assert bulk.future.result()[:, 0].tolist() == [60.0 * i for i in range(20, 100)]


def test_the_oldest_texts_run_first():
    queue = JobDriver(Adder(), 10_000)
    queue.submit(request(*range(20, 60), length=60))
    run_all(queue)
    assert queue.runner.calls[0] == [20, 21]


def test_only_the_text_that_is_not_finite_fails():
    queue = JobDriver(Adder(), 100)
    good, bad = request(1, 2), request(POISON)
    queue.submit(good)
    queue.submit(bad)
    run_all(queue)
    assert good.future.result().tolist() == [[8, 8], [16, 8]]
    with pytest.raises(NumericalError, match="text 0"):
        bad.future.result()


def test_texts_that_wait_again_are_the_first_of_their_priority(monkeypatch):
    queue = JobDriver(Adder(), 100)
    old, new = request(POISON, 20, 21), request(30)
    run = queue.runner.run

    def run_while_others_come(*arguments):
        queue.submit(new)
        return run(*arguments)

    queue.submit(old)
    monkeypatch.setattr(queue.runner, "run", run_while_others_come)
    assert queue.run_next() == 3
    monkeypatch.setattr(queue.runner, "run", run)
    waiting = queue._queue.devices[0].bulk.first(0, 9)
    assert [int(text.tokens.ids[0]) for text in waiting] == [POISON, 20, 21, 30], "the oldest is found first"
    run_all(queue)
    assert queue.runner.calls == [[POISON, 20, 21], [POISON], [30]], "the request of the first failed"
    assert new.future.result().tolist() == [[240, 8]]


def test_a_failing_call_ends_its_texts_and_no_others():
    queue = JobDriver(Adder(), 1000)
    first, second = request(1, length=60), request(*range(2, 6), length=60)
    queue.submit(first)
    queue.runner.failure = RuntimeError("lost")
    assert queue.run_next()
    queue.runner.failure = None
    queue.submit(second)
    run_all(queue)
    with pytest.raises(DeviceError, match="lost"):
        first.future.result()
    assert second.future.result().shape == (4, 2)


def test_cancelled_and_late_texts_do_not_run():
    queue = JobDriver(Adder(), 100)
    cancelled, late, kept = request(1), request(2, deadline=time.perf_counter() - 1), request(3)
    for each in (cancelled, late, kept):
        queue.submit(each)
    assert cancelled.future.cancel()
    run_all(queue)
    assert queue.runner.calls == [[3]]
    with pytest.raises(StaticLLMError, match="deadline"):
        late.future.result()
    with pytest.raises(CancelledError):
        cancelled.future.result()


def test_a_full_queue_refuses_and_an_empty_one_takes_any_number():
    queue = JobDriver(Adder(), 4)
    queue.submit(request(*range(6)))
    with pytest.raises(BusyError, match="6 texts wait, 1 more would exceed max_waiting 4"):
        queue.submit(request(9))
    run_all(queue)
    queue.submit(request(9))


def test_closing_ends_what_waits():
    queue = JobDriver(Adder(), 100)
    waiting = request(1, 2)
    queue.submit(waiting)
    queue.next_job()
    queue.close()
    with pytest.raises(ClosedError):
        waiting.future.result()
    with pytest.raises(ClosedError):
        queue.submit(request(3))


def test_late_texts_make_room_for_others():
    queue = JobDriver(Adder(), 2)
    late, other = request(1, 2, deadline=time.perf_counter()), request(3)
    queue.submit(late)
    queue.submit(other)
    with pytest.raises(StaticLLMError, match="the deadline passed"):
        late.future.result(1)
    queue.close()
    with pytest.raises(ClosedError):
        other.future.result(1)
    assert not queue.has_jobs


def test_a_text_that_is_late_or_cancelled_after_planning_does_not_run():
    queue = JobDriver(Adder(), 100)
    late, cancelled, kept = request(1, deadline=time.perf_counter() + 1), request(2), request(3)
    for each in (late, cancelled, kept):
        queue.submit(each)
    assert queue.next_job().deadline == late.deadline
    time.sleep(max(0.0, late.deadline - time.perf_counter()))
    cancelled.future.cancel()
    assert queue.next_job().deadline is None
    run_all(queue)
    assert queue.runner.calls == [[3]]
    with pytest.raises(StaticLLMError, match="deadline"):
        late.future.result()


def test_a_host_limits_the_time_of_a_call_except_for_long_texts():
    queue = JobDriver(Adder(), 1000)
    queue.submit(request(*range(20, 40), length=12))
    assert queue.next_job(0.25).seconds == pytest.approx(0.216)
    run_all(queue)
    queue.submit(request(1, length=60))
    assert queue.next_job(0.25).seconds == pytest.approx(0.328)
    run_all(queue)
    assert queue.runner.calls[-1] == [1]


def test_closing_returns_after_the_running_call():
    queue = JobDriver(Adder(), 100)
    begun, may_end = threading.Event(), threading.Event()
    original = queue.runner.run

    def slow(*given):
        begun.set()
        may_end.wait(10)
        return original(*given)

    queue.runner.run = slow
    running, waiting = request(1), request(2)
    queue.submit(running)
    device = threading.Thread(target=queue.run_next)
    device.start()
    assert begun.wait(10)
    queue.submit(waiting)
    closing = threading.Thread(target=queue.close)
    closing.start()
    with pytest.raises(ClosedError):
        waiting.future.result(10)
    closing.join(0.05)
    assert closing.is_alive()
    may_end.set()
    closing.join(10)
    assert not closing.is_alive()
    assert running.future.result(0).tolist() == [[8, 8]]
    device.join()


def test_many_threads_get_their_own_vectors():
    engine, queue = JobEngine(), JobDriver(Adder(), 10_000)
    engine.add_jobs(queue)
    wrong = []

    def serve(number):
        for count in range(20):
            mine = request(number + 20, length=1 + (number + count) % 60)
            queue.submit(mine)
            ids = mine.texts[0].ids
            if mine.future.result(20).tolist() != [[ids.sum(), len(ids)]]:
                wrong.append(number)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close()
    engine.close()
    assert not wrong
    assert max(map(len, queue.runner.calls)) > 1


def test_waiting_for_a_cancelled_future_ends():
    queue = JobDriver(Adder(), 100)
    cancelled = request(1)
    queue.submit(cancelled)
    assert cancelled.future.cancel()
    run_all(queue)
    assert cancelled.future in wait([cancelled.future], 5).done


@pytest.mark.parametrize("ends_in", ["next_job", "run_next"])
def test_the_callback_of_a_late_text_may_submit_again(ends_in):
    queue = JobDriver(Adder(), 100)
    late, again = request(1, deadline=time.perf_counter() - 1), request(2)
    submitted = threading.Event()
    late.future.add_done_callback(lambda _: (queue.submit(again), submitted.set()))
    queue.submit(late)
    thread = threading.Thread(target=getattr(queue, ends_in), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert submitted.wait(5), "callbacks run on a thread of their own"
    run_all(queue)
    assert again.future.result(0).tolist() == [[16, 8]]


def test_a_request_that_two_threads_end_at_once_ends_once():
    ended, may_go_on = threading.Event(), threading.Event()
    mine, errors = request(1, 2), []
    original = mine.future.set_running_or_notify_cancel

    def slow():
        found = original()
        ended.set()
        may_go_on.wait(5)
        return found

    mine.future.set_running_or_notify_cancel = slow
    first = threading.Thread(target=mine.fail, args=(DeviceError("first"),))
    first.start()
    assert ended.wait(5)
    try:
        mine.fail(ClosedError("second"))
    except RuntimeError as error:
        errors.append(error)
    may_go_on.set()
    first.join()
    assert not errors
    with pytest.raises(DeviceError, match="first"):
        mine.future.result(0)


def test_texts_that_were_spoiled_run_as_calls_of_their_own():
    queue = JobDriver(Adder(), 100)
    good, bad = request(1, 2, 3), request(POISON)
    queue.submit(good)
    queue.submit(bad)
    sizes = []
    for number in range(5):
        sizes.append(queue.run_next())
        queue.submit(request(20 + number))  # what comes meanwhile does not share a call with them
    run_all(queue)
    assert sizes == [4, 1, 1, 1, 1]
    assert good.future.result().tolist() == [[8, 8], [16, 8], [24, 8]]
    with pytest.raises(NumericalError):
        bad.future.result()
    assert all(len(call) == 1 for call in queue.runner.calls[1:5])


def test_a_large_plan_is_not_made_again_for_every_text_that_comes(monkeypatch):
    planned = []
    original = encoder_runner.plan_calls
    monkeypatch.setattr(
        encoder_runner, "plan_calls", lambda lengths, *given: planned.append(len(lengths)) or original(lengths, *given)
    )
    queue = JobDriver(Adder(), 10_000)
    bulk = request(*range(20, 420), length=60)
    queue.submit(bulk)
    requests = []
    for number in range(20):
        assert queue.run_next()
        requests += [request(500 + number), request(600 + number, priority=1)]
        for each in requests[-2:]:
            queue.submit(each)
        assert queue.next_job().priority == 1
        assert queue.run_next()
        assert requests[-1].future.done()
    assert planned == [400] + 20 * [1]
    run_all(queue)
    assert bulk.future.result()[:, 0].tolist() == [60.0 * i for i in range(20, 420)]
    assert all(each.future.done() for each in requests)

"""Tests a pool of devices that only add up ids: death, hanging, cancelling, deadlines, and no text lost or run for nobody."""

import math
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
from support.encoders.fake_instances import COSTS, NAN, POISON, Adder, request, sums

from staticllm.errors import BusyError, ClosedError, DeviceError, NumericalError, PromptError, StaticLLMError
from staticllm.pipelines.embedding.pool import failures
from staticllm.pipelines.embedding.pool.instances import WorkerLostError
from staticllm.pipelines.embedding.pool.pool_loader import make_pool
from staticllm.pipelines.embedding.pool.thread_driver import ThreadDriver
from staticllm.system import threads
from staticllm.system.threads import start_thread

SECONDS = 20


@pytest.fixture
def make(request):
    """Make a pool of fakes, and close it at the end."""

    def make(*devices, policy="plain", limit_s=None, max_waiting=1000, hang_seconds=30.0):
        pool = ThreadDriver(make_pool(devices, policy, limit_s, max_waiting, hang_seconds=hang_seconds))

        def close():
            for device in devices:
                device.gate.set()
            pool.close()

        request.addfinalizer(close)
        return pool

    return make


def submit(pool, *ids, **options):
    found = request(*ids, **options)
    pool.submit(found)
    return found.future


def wait_until(is_true):
    until = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.005)


def results(*futures):
    return [future.result(SECONDS).tolist() for future in futures]


def test_texts_of_many_threads_get_their_own_vectors_from_all_devices(make):
    devices = Adder("A"), Adder("B")
    pool = make(*devices)

    def embed(number):
        return submit(pool, number, number + 1, number + 2, priority=number % 2).result(SECONDS).tolist()

    with ThreadPoolExecutor(200) as threads:
        found = list(threads.map(embed, range(20, 620)))
    assert found == [sums(n, n + 1, n + 2) for n in range(20, 620)]
    assert all(device.calls for device in devices)
    assert sum(len(call) for device in devices for call in device.calls) == 1800
    assert pool.num_waiting == 0


def test_a_request_has_the_time_of_its_texts_alone(make):
    device = Adder("A")
    device.seconds = 0.05
    pool = make(device)
    device.gate.clear()
    first = request(20)
    pool.submit(first)
    assert device.began.wait(SECONDS)
    small, large = request(21), request(*range(22, 25))
    for each in (small, large):  # both wait for the first, which has a call of its own, and then share one
        pool.submit(each)
    time.sleep(0.3)
    device.gate.set()
    results(first.future, small.future, large.future)
    assert len(device.calls) == 2
    assert first.device_seconds >= 0.3
    assert large.device_seconds == pytest.approx(3 * small.device_seconds)
    assert 0.05 <= small.device_seconds + large.device_seconds < 0.3


def test_queries_go_before_documents_and_long_texts_to_the_fast_device(make):
    fast, slow = Adder("fast"), Adder("slow")
    slow.costs = {variant: 4 * cost for variant, cost in COSTS.items()}
    pool = make(fast, slow, policy="predicted", limit_s=0.1)
    fast.gate.clear()
    slow.gate.clear()
    first = submit(pool, 1, 2, length=60)  # both documents begin, one on each device or both on the fast one
    assert fast.began.wait(SECONDS)
    documents = submit(pool, *range(20, 60))
    query = submit(pool, 70, priority=1)
    fast.gate.set()
    slow.gate.set()
    results(first, documents, query)
    order = [ids for call in fast.calls + slow.calls for ids in call]
    calls = fast.calls if any(70 in call for call in fast.calls) else slow.calls
    assert next(n for n, call in enumerate(calls) if 70 in call) <= 1, f"a query waits for one batch at most: {order}"


def test_documents_that_end_sooner_where_they_are_stay_there(make):
    fast, slow = Adder("fast"), Adder("slow")
    slow.costs = {variant: 1000 * cost for variant, cost in COSTS.items()}
    pool = make(fast, slow)
    fast.gate.clear()
    futures = [submit(pool, 20)]
    assert fast.began.wait(SECONDS)
    futures += [submit(pool, number) for number in range(21, 40)]
    assert pool.num_waiting == 19, "no thread holds the lock while there is nothing to take"
    fast.gate.set()
    assert results(*futures) == [sums(number) for number in range(20, 40)]
    assert not slow.calls


def test_a_killed_worker_loses_nothing(make):
    devices = Adder("A"), Adder("B")
    pool = make(*devices)
    for device in devices:
        device.gate.clear()
    futures = [submit(pool, number) for number in range(20, 60)]
    assert devices[0].began.wait(SECONDS)
    devices[0].killed.set()
    wait_until(lambda: devices[0].num_recovered)
    for device in devices:
        device.gate.set()
    assert results(*futures) == [sums(number) for number in range(20, 60)]
    assert pool.alive == ("A", "B")


def test_queries_of_the_only_worker_run_after_its_restart_although_they_are_late(make):
    device = Adder("A")
    pool = make(device, policy="predicted", limit_s=0.05)
    device.gate.clear()
    running = submit(pool, 30, priority=1)
    assert device.began.wait(SECONDS)
    waiting = submit(pool, 31, priority=1)
    time.sleep(0.06)
    device.killed.set()
    device.gate.set()
    assert results(running, waiting) == [sums(30), sums(31)]


def test_a_device_that_fails_in_every_call_is_left_out_and_the_others_serve(make):
    dead, alive = Adder("dead"), Adder("alive")
    dead.failure = RuntimeError("Exception from core.cpp:1\n[GPU] out of resources")
    alive.seconds, pool = max(COSTS.values()), make(dead, alive)  # were it faster, the other would be asked no more
    until = time.monotonic() + SECONDS
    while pool.alive != ("alive",) or len(dead.calls) < failures.MAX_FAILURES:
        assert time.monotonic() < until
        futures = [submit(pool, number) for number in range(20, 60)]
        assert results(*futures) == [sums(number) for number in range(20, 60)]
    assert len(dead.calls) == failures.MAX_FAILURES


def test_without_a_device_that_works_texts_get_one_line(make):
    device = Adder("A")
    pool = make(device)
    device.failure = RuntimeError("Exception from core.cpp:1\n[GPU] out of resources")
    with pytest.raises(DeviceError, match="out of resources") as raised:
        submit(pool, 1, 2).result(SECONDS)
    assert "\n" not in str(raised.value)
    for _ in range(5):
        with pytest.raises(DeviceError):
            submit(pool, 3).result(SECONDS)
    with pytest.raises(DeviceError, match=r"no device works any more \(A: .*load the pipeline again"):
        submit(pool, 3)


def test_a_device_that_fails_once_is_used_again(make):
    device = Adder("A")
    pool = make(device)
    device.failure = RuntimeError("once")
    device.heals = True
    assert results(submit(pool, 1)) == [sums(1)]
    assert pool.alive == ("A",)


def test_a_text_that_kills_its_workers_fails_alone(make):
    devices = Adder("A"), Adder("B")
    pool = make(*devices)
    for device in devices:
        device.gate.clear()
    blocked = [submit(pool, 20), submit(pool, 21)]
    poison, others = submit(pool, POISON), [submit(pool, number) for number in range(30, 60)]
    for device in devices:
        device.gate.set()
    assert results(*blocked, *others) == [sums(number) for number in [20, 21, *range(30, 60)]]
    with pytest.raises(WorkerLostError, match="poisoned"):
        poison.result(SECONDS)
    assert sum(POISON in call for device in devices for call in device.calls) == failures.MAX_RUNS


def test_a_worker_that_hangs_is_killed_and_its_texts_run_elsewhere(make):
    hanging, other = Adder("hanging"), Adder("other")
    hanging.gate.clear()
    pool = make(hanging, other, hang_seconds=0.5)
    futures = [submit(pool, number) for number in range(20, 40)]
    assert results(*futures) == [sums(number) for number in range(20, 40)]
    wait_until(lambda: hanging.num_recovered)


def test_a_device_of_this_process_that_hangs_is_used_again_when_it_returns(make):
    hanging, other = Adder("hanging", can_be_killed=False), Adder("other")
    hanging.gate.clear()
    pool = make(hanging, other, hang_seconds=0.5)
    futures = [submit(pool, number) for number in range(20, 40)]
    assert results(*futures) == [sums(number) for number in range(20, 40)]
    assert pool.alive == ("other",)
    hanging.gate.set()
    wait_until(lambda: pool.alive == ("hanging", "other"))


def test_the_only_device_hangs(make):
    device = Adder("A", can_be_killed=False)
    device.gate.clear()
    pool = make(device, hang_seconds=0.5)
    future = submit(pool, 1)
    with pytest.raises(DeviceError, match=r"A has not answered for 0\.5 s"):
        future.result(SECONDS)
    with pytest.raises(DeviceError, match="not answered"):
        submit(pool, 2)
    device.gate.set()


def test_deadlines_pass_without_any_other_event(make):
    device = Adder("A")
    device.gate.clear()
    pool = make(device)
    running = submit(pool, 1)
    assert device.began.wait(SECONDS)
    late = submit(pool, 2, 3, deadline=time.perf_counter() + 0.5)
    with pytest.raises(StaticLLMError, match="deadline"):
        late.result(SECONDS)
    assert pool.num_waiting == 0
    device.gate.set()
    assert results(running) == [sums(1)]
    assert device.calls == [[1]]


@pytest.mark.parametrize("seconds", [1e10, 1e300])
def test_a_deadline_beyond_what_a_thread_can_wait_leaves_the_clock_alive(make, seconds):
    device = Adder("A")
    device.gate.clear()
    pool = make(device)
    running = submit(pool, 1)
    assert device.began.wait(SECONDS)
    far = submit(pool, 2, deadline=time.perf_counter() + seconds)
    with pool._lock:  # the deadline is the only event that the clock waits for
        pool.pool.devices[0].ends_by = math.inf
        pool._clock_wake.notify()
    late = submit(pool, 3, deadline=time.perf_counter() + 0.3)
    with pytest.raises(StaticLLMError, match="deadline"):
        late.result(SECONDS)
    device.gate.set()
    assert results(running, far) == [sums(1), sums(2)]
    assert pool._clock.is_alive()


def test_cancelled_texts_do_not_run(make):
    device = Adder("A")
    device.gate.clear()
    pool = make(device)
    running = submit(pool, 1)
    assert device.began.wait(SECONDS)
    waiting = submit(pool, 2, 3)
    assert waiting.cancel()
    assert running.cancel()
    assert pool.num_waiting == 0
    device.gate.set()
    assert results(submit(pool, 4)) == [sums(4)]
    assert device.calls == [[1], [4]]
    with pytest.raises(CancelledError):
        running.result(0)


def test_a_request_is_admitted_whole_or_not_at_all(make):
    device = Adder("A")
    device.costs = {
        variant: 20 * cost for variant, cost in COSTS.items()
    }  # a busy machine may hold a thread for 100 ms
    pool = make(device, policy="predicted", limit_s=0.2)
    device.gate.clear()
    blocking = submit(pool, 1, priority=1)
    assert device.began.wait(SECONDS)
    time.sleep(0.1)
    with pytest.raises(BusyError) as raised:
        submit(pool, *range(20, 52), priority=1)
    assert raised.value.retry_after > 0
    assert pool.num_waiting == 0
    device.gate.set()
    assert results(blocking) == [sums(1)]


def test_too_many_documents_are_refused_unless_none_waits(make):
    device = Adder("A")
    device.gate.clear()
    pool = make(device, max_waiting=10)
    running = submit(pool, 1)
    assert device.began.wait(SECONDS)
    waiting = submit(pool, *range(20, 29))
    assert pool.num_waiting == 9
    with pytest.raises(BusyError, match="max_waiting 10") as raised:
        submit(pool, 2, 3)
    assert raised.value.retry_after > 0
    device.gate.set()
    assert results(running, waiting) == [sums(1), sums(*range(20, 29))]
    assert results(submit(pool, *range(20, 60))) == [sums(*range(20, 60))]


@pytest.mark.parametrize("priority", [0, 1, 7])
@pytest.mark.parametrize("limits", [{}, {"policy": "predicted", "limit_s": 100.0}])
def test_no_priority_exceeds_the_texts_that_may_wait(make, priority, limits):
    device = Adder("A")
    device.gate.clear()
    pool = make(device, max_waiting=4, **limits)
    running = submit(pool, 1)
    assert device.began.wait(SECONDS)
    waiting = [submit(pool, number, priority=priority) for number in range(20, 24)]
    with pytest.raises(BusyError, match="4 texts wait, 1 more would exceed max_waiting 4"):
        submit(pool, 24, priority=priority)
    device.gate.set()
    assert results(running, *waiting) == [sums(1), *(sums(number) for number in range(20, 24))]


def test_texts_that_are_not_admitted_yet_count_as_waiting():
    state = make_pool([Adder("A")], "plain", None, 4).queue
    first, second, third = request(1, 2, 3), request(4, 5), request(6)
    ids = state.number(first, 0.0)
    with pytest.raises(BusyError, match="3 texts wait, 2 more"):
        state.number(second, 0.0)
    state.admit(first, ids, 0.0)
    state.number(third, 0.0)
    with pytest.raises(BusyError, match="4 texts wait, 2 more"):
        state.number(second, 0.0)
    state.drop(third)
    state.drop(first)
    state.number(second, 0.0)


def test_a_vector_that_is_not_finite_fails_only_its_own_text(make):
    pool = make(Adder("A"), Adder("B"))
    futures = [submit(pool, number) for number in (20, NAN, 21)]
    assert results(futures[0], futures[2]) == [sums(20), sums(21)]
    with pytest.raises(NumericalError, match="text 0"):
        futures[1].result(SECONDS)


def test_close_ends_everything(make):
    device = Adder("A")
    device.gate.clear()
    pool = make(device)
    running = submit(pool, 1)
    assert device.began.wait(SECONDS)
    waiting = submit(pool, 2)
    closing = threading.Thread(target=pool.close)
    closing.start()
    wait_until(lambda: pool._is_closing)
    device.gate.set()
    closing.join(SECONDS)
    assert results(running) == [sums(1)]
    with pytest.raises(ClosedError):
        waiting.result(SECONDS)
    assert device.is_closed
    with pytest.raises(ClosedError):
        submit(pool, 3)
    pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staticllm-embedding-")]


def test_costs_follow_the_measured_seconds(make):
    device = Adder("A")
    pool = make(device)
    assert results(submit(pool, 1)) == [sums(1)]
    before = pool.pool.devices[0].queue.alone(8)
    for _ in range(20):
        device.gate.clear()
        future = submit(pool, 1)
        threading.Timer(0.02, device.gate.set).start()
        results(future)
    assert pool.pool.devices[0].queue.alone(8) > 2 * before


def test_a_text_of_too_many_tokens_is_refused(make):
    with pytest.raises(PromptError, match="65 tokens, the limit is 64"):
        submit(make(Adder("A")), 1, length=65)


def test_the_future_of_a_request_that_a_closed_pool_refuses_is_cancelled(make):
    pool = make(Adder("A"))
    pool.close()
    refused = request(1)
    with pytest.raises(ClosedError):
        pool.submit(refused)
    assert refused.future.cancelled()
    long = request(1, length=65)
    with pytest.raises(PromptError):
        make(Adder("B")).submit(long)
    assert long.future.cancelled()


def test_threads_that_cannot_start_refuse_a_request_and_start_with_a_later_one(make, monkeypatch):
    devices = Adder("A"), Adder("B")
    pool = make(*devices)

    def start(run, name):
        if name.endswith("-B"):
            raise StaticLLMError("no more threads")
        return start_thread(run, name)

    with monkeypatch.context() as patch:
        patch.setattr(threads, "start_thread", start)
        refused = request(1)
        with pytest.raises(StaticLLMError, match="no more threads"):
            pool.submit(refused)
    assert refused.future.cancelled()
    devices[0].gate.clear()
    found = submit(pool, *range(20, 80), length=60)
    assert devices[1].began.wait(SECONDS)
    devices[0].gate.set()
    assert results(found) == [sums(*range(20, 80), length=60)]


def test_a_pool_some_of_whose_threads_could_not_start_is_closed(monkeypatch):
    devices = Adder("A"), Adder("B")
    pool = ThreadDriver(make_pool(devices, "plain", None, 1000))

    def start(run, name):
        if name.endswith("-B"):
            raise StaticLLMError("no more threads")
        return start_thread(run, name)

    monkeypatch.setattr(threads, "start_thread", start)
    with pytest.raises(StaticLLMError):
        submit(pool, 1)
    pool.close()
    assert [device.is_closed for device in devices] == [True, True]


def test_a_refused_request_leaves_nothing_before_the_lock_is_given_back():
    pool = make_pool([Adder("A")], "predicted", 0.01, 1000)
    state = pool.queue
    refused, now = request(*range(20, 60), priority=1), time.perf_counter()
    with pytest.raises(PromptError):
        state.admit(refused, state.number(refused, now), now)
    assert state.num_waiting == 0
    assert not pool.has_work(pool.devices[0])


def test_a_device_that_failed_does_not_take_back_what_it_left_to_others():
    state = make_pool([Adder("A"), Adder("B")], "plain", None, 1000)
    first, other = state.devices
    now = time.perf_counter()
    texts = request(*range(20, 40))
    state.queue.admit(texts, state.queue.number(texts, now), now)
    batch = state.begin(first, now)
    state.fail(first, batch, batch.texts, DeviceError("it failed"), now)
    state.recovered(first, None, now)
    assert first.queue.is_alive
    assert state.begin(first, now) is None
    assert state.has_work(other)

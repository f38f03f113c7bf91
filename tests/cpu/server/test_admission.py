"""Tests the order in which requests enter a model, for any sequence of arrivals, ends and cancellations."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples
from support.server.served import serving

from staticllm.errors import BusyError
from staticllm.server.http.errors import ApiError, api_error_of
from staticllm.server.models import admission as admission_module
from staticllm.server.models.admission import Admission, AdmissionLimits

STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "search", "leave", "cancel", "cancel at once"]), st.integers(0, 3)), max_size=60
)


@settings(max_examples=examples(200), deadline=None)
@given(
    steps=STEPS,
    limits=st.builds(
        AdmissionLimits, st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.none() | st.integers(1, 5)
    ),
)
def test_limits_hold_and_nobody_is_forgotten(steps, limits):
    asyncio.run(follow(steps, limits))


async def follow(steps, limits):
    admission = Admission(limits)
    waiting: list[tuple[str, asyncio.Task[None]]] = []
    running: list[tuple[str, int]] = []  # the client of each, and its places

    async def follow_tasks():
        for _ in range(4):
            await asyncio.sleep(0)
        for entry in list(waiting):
            client, task = entry
            if task.done():
                waiting.remove(entry)
                if not task.cancelled() and task.exception() is None:
                    running.append((client, task.result()))

    for action, number in steps:
        client = f"client {number}"
        if action in ("enter", "search"):
            task = asyncio.create_task(admission.enter(client, weight=1 if action == "enter" else 3))
            waiting.append((client, task))
            await follow_tasks()
            if task.done() and not task.cancelled() and isinstance(task.exception(), ApiError):
                assert task.exception().status == 429
                assert len(waiting) >= limits.max_waiting
        elif action == "leave" and running:
            admission.leave(*running.pop(number % len(running)))
        elif action.startswith("cancel") and waiting:
            if action == "cancel at once" and running:  # it is admitted in the moment in which it is cancelled
                admission.leave(*running.pop())
            waiting[number % len(waiting)][1].cancel()
        await follow_tasks()
        counts = Counter()
        for client, num_places in running:
            counts[client] += num_places
        assert admission.num_running == sum(counts.values()) <= limits.max_running
        assert all(count <= max(limits.max_per_client, limits.max_alone or 0) for count in counts.values())
        assert admission.num_waiting == len(waiting) <= limits.max_waiting
        for waits, _ in waiting:  # nobody waits without a reason; a search needs up to 3 places
            num_used = sum(counts.values())
            assert num_used > limits.max_running - 3 or counts[waits] > limits.max_per_client - 3
            if action != "search" and not any(name == "search" for name, _ in steps):
                assert num_used == limits.max_running or counts[waits] >= limits.max_per_client
    while running or waiting:
        for _, task in waiting:
            task.cancel()
        for entry in running:
            admission.leave(*entry)
        running.clear()
        await follow_tasks()
    assert not admission._clients
    assert not admission._running
    assert not admission.num_running


def test_the_client_with_fewest_running_answers_is_next():
    async def run():
        admission = Admission(AdmissionLimits(3, 3, 20))
        order = []

        async def enter(client):
            await admission.enter(client)
            order.append(client)

        tasks = [asyncio.create_task(enter("many")) for _ in range(8)]
        await asyncio.sleep(0.01)
        tasks += [asyncio.create_task(enter("late")) for _ in range(2)]
        await asyncio.sleep(0.01)
        for _ in range(3):
            admission.leave("many")
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        return order[3:]

    assert asyncio.run(run()) == ["late", "many", "late"]  # with one each, it is the turn of "many"


def test_a_client_has_all_places_while_it_is_alone_and_a_newcomer_enters_at_once(monkeypatch):
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(admission_module, "time", clock)
    limits = AdmissionLimits.of(num_seqs=8, max_per_client=None, max_waiting=64)
    assert (limits.max_running, limits.max_per_client, limits.max_alone) == (10, 6, 8)

    async def run():
        admission = Admission(limits)
        many = await _waiting(admission, *["many"] * 12)
        assert admission.num_running == 8
        assert admission.num_waiting == 4
        newcomer = await _waiting(admission, "new", "new", "new")
        assert [task.done() for task in newcomer] == [True, True, False], "the last quarter is for others"
        for _ in range(3):  # the places of "many" fall to three quarters
            admission.leave("many")
            await asyncio.sleep(0)
        await newcomer[2]
        assert admission._running == {"many": 6, "new": 3}
        assert admission.num_waiting == 3
        for _ in range(3):
            admission.leave("new")
        await asyncio.sleep(0)
        assert admission._running == {"many": 6}, "the other one is known for a minute"
        now[0] += admission_module.KNOWN_SECONDS + 1
        admission.leave("many")
        await asyncio.sleep(0)
        assert admission._running == {"many": 8}
        assert admission.num_waiting == 0
        for task in many:
            task.cancel()

    asyncio.run(run())


def test_a_limit_that_was_given_holds_for_a_client_that_is_alone():
    async def run():
        admission = Admission(AdmissionLimits.of(8, 3, 64))
        tasks = await _waiting(admission, *["many"] * 5)
        assert admission.num_running == 3
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0)

    asyncio.run(run())


async def _waiting(admission, *clients, is_request=True, weight=1):
    tasks = [asyncio.create_task(admission.enter(client, is_request, weight=weight)) for client in clients]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def test_a_search_takes_as_many_places_as_it_has_beams():
    """It counted as one answer: a client with a few searches had all of the engine."""

    async def run():
        admission = Admission(AdmissionLimits(max_running=10, max_per_client=6, max_waiting=4))
        assert await admission.enter("searching", weight=4) == 4
        (second,) = await _waiting(admission, "searching", weight=4)
        assert admission._running == {"searching": 4}
        assert not second.done()
        other = await _waiting(admission, *["other"] * 6)
        assert all(task.done() for task in other)
        assert admission.num_running == 10
        large, small = await _waiting(admission, "large", weight=64), await _waiting(admission, "other")
        admission.leave("searching", 4)
        await _settled()
        assert not second.done(), "6 places are kept for it, 4 are free"
        assert not large[0].done(), "6 places are kept for it, 4 are free"
        late = await _waiting(admission, "late")
        assert not late[0].done(), "nobody takes them"
        for _ in range(2):
            admission.leave("other")
        await _settled()
        assert large[0].result() == 6, "no more than its client may have"
        admission.leave("large", 6)
        await _settled()
        assert second.result() == 4
        assert late[0].result() == 1
        small[0].cancel()
        await asyncio.gather(*small, return_exceptions=True)

    asyncio.run(run())


def test_places_that_are_kept_for_a_search_are_free_when_it_gives_up():
    async def run():
        admission = Admission(AdmissionLimits(max_running=4, max_per_client=4, max_waiting=4))
        await admission.enter("one")
        search = await _waiting(admission, "two", weight=4)
        late = await _waiting(admission, "three", "three")
        assert not any(task.done() for task in (*search, *late))
        search[0].cancel()
        await _settled()
        assert [task.result() for task in late] == [1, 1]

    asyncio.run(run())


async def _settled():
    for _ in range(4):
        await asyncio.sleep(0)


def test_a_flood_of_one_client_does_not_fill_the_queue_of_others():
    async def run():
        admission = Admission(AdmissionLimits(max_running=1, max_per_client=1, max_waiting=4))
        await admission.enter("flood")
        flood = await _waiting(admission, *["flood"] * 6)
        refused = [task for task in flood if task.done()]
        assert [task.exception().status for task in refused] == [429, 429]
        others = await _waiting(admission, "a", "b")
        assert not any(task.done() for task in others)
        assert [task.done() for task in flood][:3] == [False, False, True]  # its last ones made room
        third, fourth = await _waiting(admission, "c", "d")
        assert not third.done()
        assert fourth.exception().status == 429  # now each has one
        assert admission.num_waiting == 4
        admission.leave("flood")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert others[0].done()
        assert others[0].exception() is None
        left = (*flood, *others, third)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    asyncio.run(run())


def test_further_answers_of_a_request_are_not_refused_and_do_not_fill_the_queue():
    async def run():
        admission = Admission(AdmissionLimits(max_running=2, max_per_client=2, max_waiting=1))
        await admission.enter("one")
        more = await _waiting(admission, *["one"] * 20, is_request=False)
        assert sum(task.done() for task in more) == 1
        assert admission.num_waiting == 19
        (other,) = await _waiting(admission, "other")
        assert not other.done()
        admission.leave("one")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert other.done()
        assert other.exception() is None
        for task in more:
            task.cancel()
        await asyncio.gather(*more, return_exceptions=True)

    asyncio.run(run())


def test_a_priority_orders_the_requests_of_one_client_and_no_others():
    async def test():
        admission, admitted = Admission(AdmissionLimits(1, 1, 10)), []

        async def ask(client, name, priority):
            await admission.enter(client, priority=priority)
            admitted.append(name)
            admission.leave(client)

        await admission.enter("other")
        asked = [
            ("a", "a0", 0),
            ("a", "a5", 5),
            ("a", "a5 again", 5),
            ("b", "b-1", -1),
            ("a", "a1000", 1000),
            ("b", "b0", 0),
        ]
        tasks = []
        for each in asked:
            tasks.append(asyncio.ensure_future(ask(*each)))
            await asyncio.sleep(0)
        admission.leave("other")
        await asyncio.gather(*tasks)
        assert [name for name in admitted if name.startswith("a")] == ["a1000", "a5", "a5 again", "a0"]
        assert [name for name in admitted if name.startswith("b")] == ["b0", "b-1"]
        assert admitted.index("b0") == 1, "the client with the fewest answers is next, whatever another says"

    asyncio.run(test())


def test_a_search_takes_as_many_places_of_its_client_as_it_has_beams():
    with serving(properties={"MAX_NUM_SEQS": 8}) as served, ThreadPoolExecutor(2) as pool:
        admission = served.state.hub.models["demo"].admission
        messages = [{"role": "user", "content": "Tell me a story."}]
        ask = {"model": "demo", "messages": messages, "max_tokens": 30, "ignore_eos": True, "num_beams": 5}
        seen = set()
        asked = [pool.submit(httpx.post, served.url + "/v1/chat/completions", json=ask, timeout=60) for _ in "ab"]
        while not all(answer.done() for answer in asked):
            seen.add((admission.num_running, admission.num_waiting))
            time.sleep(0.001)
        assert {answer.result().status_code for answer in asked} == {200}
        assert (5, 1) in seen, "the second search waits, since its client may have 8 places"
        assert max(seen)[0] == 5
        served.wait_until_idle()


def test_an_engine_of_the_server_refuses_nothing_that_was_admitted():
    with serving(properties={"MAX_NUM_SEQS": 2}) as served:
        model = served.state.hub.models["demo"]
        assert model.pipeline.config.max_waiting > 1000 * model.admission.limits.max_running
    with serving(properties={"MAX_NUM_SEQS": 2, "MAX_WAITING": 5}) as served:
        assert served.state.hub.models["demo"].pipeline.config.max_waiting == 5
    refused = api_error_of(
        BusyError("5 requests wait, MAX_WAITING is 5: try again later, or load with a larger MAX_WAITING")
    )
    assert (refused.status, refused.knob) == (429, "-p MAX_WAITING")
    assert refused.message.endswith("try again later, or serve with a larger -p MAX_WAITING")

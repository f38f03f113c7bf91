"""Tests who gets the device next: one at a time, fairly by used time, and in time for the next tokens of engines."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.daemon.sharing.device_scheduler import (
    ClientId,
    DeviceRequest,
    DeviceScheduler,
    EngineId,
    Share,
)
from staticllm.daemon.sharing.device_use import DeviceUse
from staticllm.pipelines.engine.device_use import Demand, Rows, demand_of, rows_of
from staticllm.pipelines.scheduling.device_share import MIN_SHARE
from staticllm.pipelines.scheduling.request_table import Limits

NOBODY = 9
"""An owner that has asked for nothing."""


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


class World:
    """Asks that wait without threads: ``ask`` adds one, ``granted`` returns those that may run now."""

    def __init__(self):
        self.clock = Clock()
        self.scheduler = DeviceScheduler(self.clock)
        self.asks = []

    def ask(self, owner, seconds, **more):
        ask = DeviceRequest(owner, seconds, **more)
        thread = threading.Thread(target=self.scheduler.acquire, args=(ask,), daemon=True)
        thread.start()
        self.asks.append((ask, thread))
        while not self._has(ask):
            assert thread.is_alive() or self._has(ask)
        self.look()  # it follows the first look at this ask
        return ask

    def ask_after(self, pause, owner, seconds, **more):
        self.clock.now += pause
        return self.ask(owner, seconds, **more)

    def _has(self, ask):
        return ask in self.scheduler.waiting or ask in self.scheduler.running

    def look(self):
        """Let the scheduler look at all that wait, as it does after a while."""
        self.scheduler.set_due(NOBODY, None)

    def give(self, ask, seconds=None, due=None):
        self.clock.now += ask.seconds if seconds is None else seconds
        self.scheduler.release(ask, ask.seconds if seconds is None else seconds, due)

    @property
    def running(self):
        return list(self.scheduler.running)

    def end(self):
        for _ in range(1000):
            self.clock.now += 1
            self.look()
            if not self.running:
                break
            self.give(self.running[0], 0.0)
        for _, thread in self.asks:
            thread.join(5)
            assert not thread.is_alive()


@pytest.fixture
def world():
    world = World()
    yield world
    for owner in list(world.scheduler.due):
        world.scheduler.set_due(owner, None)
    world.end()


def test_one_ask_has_the_device_at_a_time(world):
    first, second = world.ask(1, 1.0), world.ask(2, 1.0)
    assert world.running == [first]
    world.give(first)
    assert world.running == [second]


def test_the_owner_who_used_least_goes_first_and_rest_gives_no_credit(world):
    sizes, used, order = {1: 1.0, 2: 0.1}, {1: 0.0, 2: 0.0, 3: 0.0}, []
    for owner in (1, 1, 2, 2):
        world.ask(owner, sizes[owner])
    for count in range(60):
        if count == 44:  # a third owner comes late: it is owed nothing
            sizes[3] = 1.0
            world.ask(3, 1.0)
            world.ask(3, 1.0)
        (held,) = world.running
        used[held.owner] += held.seconds
        order.append(held.owner)
        world.give(held)
        world.ask(held.owner, sizes[held.owner])
    assert used[1] == pytest.approx(used[2] + 0.0, abs=1.6)
    assert order.count(2) > 5 * order.count(1)
    assert 1 <= used[3] <= 3


def test_priorities_go_first(world):
    held = world.ask(1, 1.0)
    low, high = world.ask(2, 1.0), world.ask(3, 1.0, priority=5)
    world.give(held)
    assert world.running == [high]
    world.give(high)
    assert world.running == [low]


def test_calls_of_one_model_run_together_in_its_streams(world):
    asks = [world.ask(1, 1.0, model=7, width=2) for _ in range(3)]
    other = world.ask(2, 1.0, model=8)
    assert world.running == asks[:2]
    world.give(asks[0])
    assert len(world.running) == 2 or world.running == [asks[1]]
    while world.running:
        world.give(world.running[0])
    assert other not in world.scheduler.waiting


def test_a_call_that_would_delay_a_token_waits_until_its_share_is_due(world):
    engine = world.ask(-1, 0.02)
    call = world.ask(1, 0.2)
    short = world.ask(2, 0.01)
    steps = []
    for _ in range(200):
        if call in world.running:
            break
        if engine in world.running:
            world.give(engine, 0.02, due=world.clock.now + 0.02 + 0.08)
            steps.append(world.clock.now)
        if short in world.running:
            world.give(short)
        if call in world.running:
            break
        engine = world.ask(-1, 0.02)
    wanted = 0.2 * (1 - MIN_SHARE) / MIN_SHARE
    assert steps[-1] == pytest.approx(wanted, abs=0.1)
    assert short not in world.scheduler.waiting  # it fits between two tokens
    engine_next = world.ask(-1, 0.02)
    world.give(call)
    again = world.ask(1, 0.2)
    for ask in list(world.running):
        world.give(ask, due=world.clock.now + 0.1 if ask.owner == -1 else None)
    assert again in world.scheduler.waiting  # the next one waits its share again
    assert engine_next not in world.scheduler.waiting or engine_next in world.running


def test_an_engine_without_running_requests_delays_nobody(world):
    engine = world.ask(-1, 0.02)
    call = world.ask(1, 5.0)
    world.give(engine, due=None)
    assert world.running == [call]


def test_an_owner_who_goes_is_forgotten(world):
    engine = world.ask(-1, 0.02)
    world.give(engine, due=world.clock.now)
    call = world.ask(1, 5.0)
    assert world.running == []
    world.scheduler.forget(-1)
    assert world.running == [call]


def test_an_engine_says_when_it_needs_the_device_again():
    scheduler = DeviceScheduler()
    use = DeviceUse(scheduler, EngineId(1))
    worker = Worker([100.0, 90.0], Demand(3))
    posted = worker.posted
    with use.turn(worker, Limits(4, tpot_ms=50.0)):
        assert scheduler.is_busy
        assert scheduler.due == {}
    assert posted == []  # nobody else had the device
    assert scheduler.due[EngineId(1)].moment == pytest.approx(90.0 + 0.05 - use.step_seconds)
    assert scheduler.due[EngineId(1)].priority == 3
    with use.turn(Worker(), Limits(4)):
        pass
    assert scheduler.due == {}
    held = DeviceRequest(1, 0.1)
    scheduler.acquire(held)
    thread = threading.Thread(target=_use, args=(use, worker))
    thread.start()
    while not scheduler.is_wanted:
        pass
    assert posted == [1]  # tokens are posted before it waits
    scheduler.release(held, 0.1)
    thread.join(5)
    with pytest.raises(KeyError), use.turn(Worker(), Limits(4)):
        raise KeyError
    assert not scheduler.is_busy
    use.close()


def _use(use, worker):
    with use.turn(worker, Limits(4)):
        pass


def test_a_higher_priority_does_not_wait_for_the_tokens_of_lower_ones_and_a_lower_one_has_no_share(world):
    engine = world.ask(-1, 0.02)
    low = world.ask(2, 5.0, priority=-1)
    world.give(engine, 0.02, due=world.clock.now + 0.05)
    assert world.running == []
    high = world.ask(1, 5.0, priority=1)
    assert world.running == [high]  # although the next token is due before its end
    engine = world.ask(-1, 0.02)
    world.give(high)
    assert world.running == [engine]
    world.clock.now += 1000
    world.give(engine, due=world.clock.now + 0.05)
    assert world.running == []  # its share is long due, but of a lower priority it has none
    world.scheduler.set_due(-1, None)
    assert world.running == [low]


def test_an_engine_goes_first_by_the_client_who_used_least_and_each_pays_for_its_rows(world):
    heavy = world.ask(1, 1.0)
    world.give(heavy, 9.0)
    held = world.ask(3, 1.0)
    mine, engine = world.ask(1, 1.0), world.ask(-5, 1.0, payers=(1, 2))
    world.give(held, 0.0)
    assert world.running == [engine]  # for client 2
    world.clock.now += 4.0
    world.scheduler.release(engine, 4.0, None, [Share(1, "decode", 1.0, 1), Share(2, "prefill", 3.0, 3)])
    assert (world.scheduler.used(1), world.scheduler.used(2)) == (10.0, 3.0)
    assert world.scheduler.used(-5) == 0.0  # it has paid nothing itself
    assert world.running == []  # client 2 has still used less, and may come back
    world.clock.now += 0.003
    world.look()
    assert world.running == [mine]


def test_plain_calls_of_one_client_and_sequences_of_another_use_the_same_time(world):
    """The engine's steps are short and the calls long, so that turns in turn would be unfair."""
    used, asks = {1: 0.0, 2: 0.0}, {1: world.ask(1, 0.3), 2: world.ask(-5, 0.02, payers=(2,))}
    for _ in range(400):
        (held,) = world.running
        client = 1 if held is asks[1] else 2
        used[client] += held.seconds
        world.clock.now += held.seconds
        world.scheduler.release(held, held.seconds, None, [Share(2, "decode", 0.02, 1)] if client == 2 else ())
        asks[client] = world.ask(1, 0.3) if client == 1 else world.ask(-5, 0.02, payers=(2,))
        if not world.running:  # whoever was waited for has come back, but has used more
            world.clock.now += 0.003
            world.look()
    assert used[1] == pytest.approx(used[2], rel=0.15)


def test_a_moment_counts_no_more_when_it_has_passed_and_the_engine_does_not_ask(world):
    world.give(world.ask(-1, 0.02), due=0.1)
    call = world.ask(1, 5.0)
    assert world.running == []
    world.clock.now = 0.2  # the client of the sequence has not come back
    wait_until(lambda: world.running == [call])


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_an_engine_that_waits_asks_again_for_a_request_of_a_higher_priority(world):
    held = world.ask(1, 1.0)
    engine, other = world.ask(-5, 1.0, payers=(2,)), world.ask(3, 1.0, priority=1)
    world.scheduler.raise_priority(-5, 4, (7,))
    world.scheduler.raise_priority(-5, 2, (8,))  # not lower again
    world.give(held)
    assert world.running == [engine]
    assert (engine.priority, engine.payers) == (4, (7,))
    world.give(engine)
    assert world.running == [other]


def test_waiting_calls_of_a_client_go_by_the_priority_that_it_has_now(world):
    held = world.ask(1, 1.0)
    lowered, other = world.ask(2, 1.0, priority=50), world.ask(3, 1.0, priority=20)
    world.scheduler.set_priority(2, 0)
    world.give(held)
    assert world.running == [other]
    raised = world.ask(4, 1.0, priority=-1)
    world.scheduler.set_priority(4, 1)
    world.give(other)
    assert world.running == [raised]
    world.give(raised)
    assert world.running == [lowered]


def test_owners_who_are_as_new_are_forgotten(world):
    for owner in (*range(1, 200), 1, 1):
        world.give(world.ask(owner, 1.0))
    assert len(world.scheduler._used) <= 65


def test_rows_and_demand_are_those_of_clients_and_phases():
    state = lambda owner, priority=0: SimpleNamespace(owner=owner, priority=priority)  # noqa: E731
    entry = lambda owner, count, is_prefill: SimpleNamespace(  # noqa: E731
        state=state(owner), segment=SimpleNamespace(tokens=[0] * count), is_prefill=is_prefill
    )
    batch = SimpleNamespace(
        entries=(entry(1, 1, False), entry(2, 5, True), entry(1, 1, False), entry(0, 1, False)),
        variant=SimpleNamespace(kv_len=16),
    )
    assert rows_of([batch], 10) == [Rows(1, "decode", 2, 40), Rows(2, "prefill", 5, 100), Rows(0, "decode", 1, 20)]
    demand = demand_of([state(1), state(2, 5), state(0, 5), state(3, 5), state(2, 5)])
    assert (demand.priority, sorted(demand.owners)) == (5, [2, 3])
    assert demand_of([]) == Demand(0, ())
    uses = []
    scheduler = DeviceScheduler(on_use=lambda ask, seconds, shares: uses.append((seconds, shares)))
    with DeviceUse(scheduler, EngineId(1), weight_bytes=80).turn(Worker(rows=rows_of([batch], 10)), Limits(4)):
        pass
    ((seconds, shares),) = uses
    assert [(each.owner, each.rows, each.num_bytes) for each in shares] == [
        (ClientId(1), 2, 60),
        (ClientId(2), 5, 150),
        (None, 1, 30),
    ]
    assert sum(each.seconds for each in shares) == pytest.approx(seconds)


class Worker:
    """An engine's core with these token times, demand and rows."""

    def __init__(self, times=(), demand=Demand(), rows=()):  # noqa: B008
        self.times, self.demand, self.rows, self.posted = times, demand, rows, []

    def post(self):
        self.posted.append(1)

    def last_token_times(self):
        return self.times


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3),
            st.sampled_from([0.001, 0.015, 0.4]),
            st.integers(0, 1),
            st.sampled_from([0.0, 0.0015, 1.0]),
        ),
        max_size=25,
    )
)
def test_an_idle_device_is_granted_at_once_as_after_the_longer_look(uses):
    short, long = World(), World()
    for owner, seconds, priority, pause in uses:
        one, other = (
            each.ask_after(pause, owner, seconds, priority=priority, payers=payers)
            for each, payers in ((short, ()), (long, (owner,)))  # a request with payers takes the longer look
        )
        assert one.is_granted is other.is_granted
        for each in (short, long):
            if not each.running:  # the device is held for another
                each.clock.now += 0.003
                each.look()
        assert one.is_granted and other.is_granted
        assert used_in(short) == used_in(long)
        short.give(one)
        long.give(other)
        assert used_in(short) == used_in(long)
    short.end()
    long.end()


def used_in(world):
    return [world.scheduler.used(owner) for owner in (1, 2, 3)]


def test_an_idle_device_that_a_token_needs_soon_takes_the_longer_look(world):
    world.scheduler.set_due(-1, 0.1)
    late = world.ask(1, 0.5)
    assert world.running == []
    world.scheduler.set_due(-1, None)
    assert world.running == [late]
    early = world.ask(2, 0.5)
    assert world.running == [late]
    world.give(late)
    assert world.running == [early]

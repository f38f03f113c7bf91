"""Tests who gets the device next: one at a time, fairly by used time, and in time for the next tokens of engines."""

from __future__ import annotations

import threading

import pytest

from staticllm.pipelines.engine.device_use import DeviceUse
from staticllm.pipelines.scheduling.device_turns import MIN_CALL_SHARE, Ask, DeviceTurns


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


class World:
    """Asks that wait without threads: ``ask`` adds one, ``granted`` returns those that may run now."""

    def __init__(self):
        self.clock = Clock()
        self.turns = DeviceTurns(self.clock)
        self.asks = []

    def ask(self, owner, seconds, **more):
        ask = Ask(owner, seconds, **more)
        thread = threading.Thread(target=self.turns.take, args=(ask,))
        thread.start()
        self.asks.append((ask, thread))
        while not (ask in self.turns._waiting or ask in self.turns._running):
            pass
        return ask

    def give(self, ask, seconds=None, due=None):
        self.clock.now += ask.seconds if seconds is None else seconds
        self.turns.give(ask, ask.seconds if seconds is None else seconds, due)

    @property
    def running(self):
        return list(self.turns._running)

    def end(self):
        for _ in range(1000):
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
    world.turns._due.clear()
    world.turns.set_due(0, None)
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
    assert other not in world.turns._waiting


def test_a_call_that_would_delay_a_token_waits_until_its_share_is_due(world):
    engine = world.ask(-1, 0.02)
    call = world.ask(1, 0.2)
    short = world.ask(2, 0.01)
    steps = []
    while call not in world.running:
        if engine in world.running:
            world.give(engine, 0.02, due=world.clock.now + 0.02 + 0.08)
            steps.append(world.clock.now)
        if short in world.running:
            world.give(short)
        if call in world.running:
            break
        engine = world.ask(-1, 0.02)
    wanted = 0.2 * (1 - MIN_CALL_SHARE) / MIN_CALL_SHARE
    assert steps[-1] == pytest.approx(wanted, abs=0.1)
    assert short not in world.turns._waiting  # it fits between two tokens
    world.give(call)
    again = world.ask(1, 0.2)
    engine_next = world.ask(-1, 0.02)
    for ask in list(world.running):
        world.give(ask, due=world.clock.now + 0.1 if ask.owner == -1 else None)
    assert again in world.turns._waiting  # the next one waits its share again
    assert engine_next not in world.turns._waiting or engine_next in world.running


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
    world.turns.forget(-1)
    assert world.running == [call]


def test_an_engine_says_when_it_needs_the_device_again():
    turns = DeviceTurns()
    use = DeviceUse(turns, -1)
    posted = []
    with use.turn(lambda: posted.append(1), lambda: [100.0, 90.0], 50.0):
        assert turns.is_busy
        assert turns._due == {}
    assert posted == []  # nobody else had the device
    assert turns._due[-1] == pytest.approx(90.0 + 0.05 - use._step_seconds)
    with use.turn(lambda: None, list, None):
        pass
    assert turns._due == {}
    held = Ask(1, 0.1)
    turns.take(held)
    thread = threading.Thread(target=_use, args=(use, posted))
    thread.start()
    while not turns.is_wanted:
        pass
    assert posted == [1]  # tokens are posted before it waits
    turns.give(held, 0.1)
    thread.join(5)
    with pytest.raises(KeyError), use.turn(lambda: None, list, None):
        raise KeyError
    assert not turns.is_busy
    use.close()


def _use(use, posted):
    with use.turn(lambda: posted.append(1), list, None):
        pass

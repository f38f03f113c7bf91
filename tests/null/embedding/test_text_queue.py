"""Tests the queue manager: Algorithm 1 against an oracle, limits that are never missed by prediction, and devices that die."""

import heapq
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.errors import BusyError, ConfigError
from staticllm.pipelines.embedding.queue.device_queue import DOCUMENT, QUERY, Busy, DeviceQueue, Health, Query
from staticllm.pipelines.embedding.queue.loads import Line, ShapeCosts
from staticllm.pipelines.embedding.queue.policies import MARGIN, Plain, Predicted, Windve, WindveQueued
from staticllm.pipelines.embedding.queue.text_queue import TextQueue
from staticllm.pipelines.scheduling.device_share import BEHIND_SHARE

FAST, SLOW = Line(0.01, 0.095, 1.0), Line(0.04, 0.2, 1.0)
PACKED = ShapeCosts({(1, 64): 0.02, (1, 128): 0.03, (4, 128): 0.08, (1, 512): 0.11})
LIMIT = 1.0


def manager(policy, *lines, depths=(4, 2)):
    devices = [
        DeviceQueue(f"D{n}", line.new_load, depth) for n, (line, depth) in enumerate(zip(lines, depths, strict=False))
    ]
    return TextQueue(devices, policy)


class AlgorithmOne:
    """The paper's Algorithm 1, with what it leaves open: counts fall when a batch ends, and a batch is the whole queue."""

    def __init__(self, depths, counts_running):
        self.depths, self.counts_running = depths, counts_running
        self.waiting, self.running = [0] * len(depths), [0] * len(depths)

    def admit(self):
        for d, depth in enumerate(self.depths):
            if self.waiting[d] + self.counts_running * self.running[d] < depth:
                self.waiting[d] += 1
                return d
        return "BUSY"

    def begin(self, d):
        if not self.running[d]:
            self.running[d], self.waiting[d] = self.waiting[d], 0
        return self.running[d]

    def finish(self, d):
        self.running[d] = 0


@pytest.mark.parametrize("policy", [Windve(), WindveQueued()])
@given(
    depths=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    steps=st.lists(st.tuples(st.sampled_from(["admit", "admit", "begin", "finish"]), st.integers(0, 2)), max_size=60),
)
def test_algorithm_1_admits_exactly_as_the_paper_says(policy, depths, steps):
    tested = manager(policy, *[FAST] * len(depths), depths=depths)
    oracle = AlgorithmOne(depths, counts_running=type(policy) is Windve)
    for number, (step, device) in enumerate(steps):
        device %= len(depths)  # noqa: PLW2901
        if step == "admit":
            place = tested.place(Query(number, number, 10 + 90 * (number % 2), number % 3), number)
            assert ("BUSY" if isinstance(place, Busy) else place) == oracle.admit()
        elif step == "begin":
            tested.begin(device, number)
            assert len(tested.devices[device].running) == oracle.begin(device)
        else:
            oracle.finish(device)
            tested.finish(device)


class Clock:
    """Runs a manager on a virtual clock; every batch takes as long as the load of its device predicts."""

    def __init__(self, tested, loads):
        self.tested, self.loads = tested, loads
        self.now, self.ends, self.ended, self.next_batch = 0.0, [], {}, 0

    def begin(self):
        for device in range(len(self.loads)):
            batch = self.tested.begin(device, self.now)
            if batch:
                load = self.loads[device].new_load()
                for query in batch:
                    load.add(query.num_tokens)
                heapq.heappush(self.ends, (self.now + load.seconds, device))

    def advance(self, until):
        while self.ends and self.ends[0][0] <= until:
            self.now, device = heapq.heappop(self.ends)
            for query in self.tested.finish(device):
                assert query.id not in self.ended, "ended twice"
                self.ended[query.id] = self.now
            self.begin()
        self.now = max(self.now, until) if until < math.inf else self.now

    def fail(self, device):
        self.ends = [(end, other) for end, other in self.ends if other != device]
        heapq.heapify(self.ends)
        return self.tested.take_out(device, Health.DEAD, None, self.now)


EVENTS = st.lists(
    st.tuples(
        st.floats(0, 0.3),
        st.sampled_from(["query"] * 6 + ["document"] * 3 + ["cancel", "fail", "revive"]),
        st.integers(1, 400),
        st.integers(0, 2),
    ),
    max_size=80,
)


@given(events=EVENTS, has_bulk=st.booleans())
def test_no_admitted_query_ends_late_and_none_is_lost(events, has_bulk):
    loads = (FAST, PACKED, SLOW)
    clock = Clock(manager(Predicted(LIMIT), *loads, depths=(0, 0, 0)), loads)
    admitted, gone = {}, set()
    for number, (gap, event, size, device) in enumerate(events):
        clock.advance(clock.now + gap)
        if event in ("query", "document"):
            priority = DOCUMENT if event == "document" and has_bulk else QUERY
            query = Query(number, clock.now, size, priority)
            if not isinstance(clock.tested.place(query, clock.now), Busy):
                admitted[number] = query
        elif event == "cancel" and admitted:
            chosen = sorted(admitted)[size % len(admitted)]
            if clock.tested.cancel(chosen):
                assert chosen not in clock.ended
                gone.add(chosen)
        elif event == "fail":
            gone |= {moved.query.id for moved in clock.fail(device) if isinstance(moved.place, Busy)}
        elif event == "revive":
            clock.tested.revive(device, clock.now)
        clock.begin()
    clock.advance(math.inf)
    assert set(clock.ended) | gone == set(admitted)
    assert not set(clock.ended) & gone
    for query_id, end in clock.ended.items():
        query = admitted[query_id]
        assert query.priority == DOCUMENT or end <= query.arrival + MARGIN * LIMIT + 1e-9


@given(
    gaps=st.lists(st.tuples(st.floats(0, 0.05), st.integers(1, 300)), min_size=30, max_size=80),
    policy=st.sampled_from([Predicted(LIMIT), Windve()]),
)
def test_a_busy_query_is_admitted_after_retry_after(gaps, policy):
    loads = (FAST, SLOW)
    clock = Clock(manager(policy, *loads), loads)
    for number, (gap, size) in enumerate(gaps):
        clock.advance(clock.now + gap)
        place = clock.tested.place(Query(number, clock.now, size), clock.now)
        clock.begin()
        if isinstance(place, Busy):
            assert 0 <= place.retry_after < math.inf
            clock.advance(clock.now + place.retry_after + 1e-9)
            assert not isinstance(clock.tested.place(Query(-1, clock.now, size), clock.now), Busy)
            return


def test_retry_after_is_the_earliest_moment_behind_a_full_queue():
    tested = manager(Predicted(LIMIT), FAST, depths=(0,))
    for number in range(70):
        assert tested.place(Query(number, 0.0, 75), 0.0) == 0
    tested.begin(0, 0.0)  # until 0.795
    places = [tested.place(Query(100 + number, 0.753, 75), 0.753) for number in range(77)]
    assert places.count(0) == 76, "0.042 s are left, and 0.095 + 76 * 0.01 s meet 0.9 s"
    assert places[-1].retry_after == pytest.approx(0.042 + 0.855 + 0.105 - 0.9)
    tested.finish(0)
    tested.begin(0, 0.795)
    early, due = (0.753 + places[-1].retry_after + shift for shift in (-0.001, 0.001))
    assert isinstance(tested.place(Query(200, early, 75), early), Busy)
    assert tested.place(Query(201, due, 75), due) == 0


def test_retry_after_behind_a_running_batch_alone():
    tested = manager(Predicted(LIMIT), FAST, depths=(0,))
    for number in range(75):
        tested.place(Query(number, 0.0, 75), 0.0)
    tested.begin(0, 0.0)
    busy = tested.place(Query(100, 0.0, 75), 0.0)
    assert busy.retry_after == pytest.approx(0.095 + 0.75 + 0.105 - 0.9)
    assert busy.reason == "no device can embed the text within 0.9 s: try again in 0.05 s"


def test_a_query_that_no_device_can_embed_in_time_is_told_so():
    tested = manager(Predicted(LIMIT), FAST, SLOW, depths=(0, 0))
    place = tested.place(Query(0, 0.0, 7000), 0.0)
    assert place == Busy(math.inf, "a text of 7000 tokens takes longer than the limit of 0.9 s: raise the limit")
    assert tested.num_waiting == 0


def test_bulk_documents_wait_for_queries_and_take_what_is_left():
    tested = manager(Predicted(LIMIT), FAST, depths=(0,))
    for number in range(40):
        assert tested.place(Query(number, 0.0, 75, DOCUMENT), 0.0) == 0
    first = tested.begin(0, 0.0)
    assert [query.id for query in first] == list(range(15)), "0.095 s + 15 * 0.01 s fill a quarter of the limit"
    assert tested.place(Query(100, 0.1, 75), 0.1) == 0
    tested.finish(0)
    second = [query.id for query in tested.begin(0, 0.25)]
    assert second[0] == 100, "the query overtakes the documents"
    assert second[1:] == list(range(15, 29)), "and they fill its batch"


def test_a_batch_of_a_query_that_is_nearly_due_gets_no_documents():
    tested = manager(Predicted(LIMIT), FAST, depths=(0,))
    tested.place(Query(0, 0.0, 75), 0.0)
    tested.place(Query(1, 0.0, 75, DOCUMENT), 0.0)
    assert [query.id for query in tested.begin(0, 0.79)] == [0], "0.105 s of its own, 0.11 s are left"


def test_an_idle_device_takes_documents_of_another_if_they_end_sooner():
    tested = manager(Predicted(LIMIT), FAST, FAST, depths=(0, 0))
    tested.devices[1].health = Health.DEAD
    for number in range(60):
        tested.place(Query(number, 0.0, 75, DOCUMENT), 0.0)
    tested.revive(1, 0.0)
    one, other = tested.begin(0, 0.0), tested.begin(1, 0.0)
    assert [query.id for query in (*one, *other)] == list(range(30))
    for device in (0, 1):
        assert len(tested.finish(device)) == 15
    assert tested.num_waiting == 30
    slow = manager(Predicted(LIMIT), FAST, Line(0.1, 0.1), depths=(0, 0))
    for number in range(3):
        slow.place(Query(number, 0.0, 75, DOCUMENT), 0.0)
    assert slow.begin(1, 0.0) == (), "the fast device ends them before the slow one ends one"
    slow.begin(0, 0.0)
    assert slow.devices[0].bulk_seconds(0) == 0


def test_a_long_text_goes_to_the_device_that_needs_the_least_time_for_it():
    first, second = Line(0.01, 0.01, 1.0), Line(0.004, 0.05, 1.0)
    tested = manager(Predicted(LIMIT), first, second, depths=(0, 0))
    assert tested.place(Query(0, 0.0, 75), 0.0) == 0
    assert tested.place(Query(1, 0.0, 3000), 0.0) == 1


def test_without_a_limit_the_device_that_ends_first_is_chosen():
    tested = manager(Plain(), FAST, SLOW)
    assert [tested.place(Query(number, 0.0, 75), 0.0) for number in range(4)] == [0, 0, 0, 0]
    tested.begin(0, 0.0)
    assert tested.place(Query(9, 0.0, 75, deadline=0.001), 0.0).reason.startswith("the text would end in ")


def test_higher_priorities_run_first_without_a_limit():
    tested = manager(Plain(), Line(0.1, 0.0))
    for number, priority in enumerate([0, 1, 0, 2]):
        tested.place(Query(number, 0.0, 75, priority), 0.0)
    assert [query.id for query in tested.begin(0, 0.0)] == [3, 1]
    tested.finish(0)
    assert [query.id for query in tested.begin(0, 0.0)] == [0, 2]


def test_cancelled_and_expired_queries_leave_their_queues():
    tested = manager(Predicted(LIMIT), FAST, depths=(0,))
    for number in range(4):
        tested.place(Query(number, 0.0, 75, deadline=0.5 if number % 2 else None), 0.0)
    before = tested.devices[0].timed.load.seconds
    assert tested.cancel(0)
    assert not tested.cancel(0)
    assert tested.devices[0].timed.load.seconds == pytest.approx(before - FAST.alpha)
    assert tested.next_deadline() == 0.5
    assert tested.expire(0.4) == []
    assert [query.id for query in tested.expire(0.5)] == [1, 3]
    assert tested.next_deadline() == math.inf
    assert tested.devices[0].timed.oldest_limit == MARGIN * LIMIT
    assert [query.id for query in tested.begin(0, 0.5)] == [2]
    assert not tested.cancel(2), "it runs"
    assert tested.devices[0].timed.oldest_limit == math.inf


def test_the_queue_of_a_dead_device_moves_to_the_others_or_is_answered_busy():
    tested = manager(Windve(), FAST, SLOW, depths=(4, 3))
    for number in range(5):
        tested.place(Query(number, number / 100, 75), 0.0)
    assert len(tested.begin(0, 0.1)) == 4
    moved = tested.take_out(0, Health.DEAD, None, 0.2)
    assert [(m.query.id, m.place if isinstance(m.place, int) else "busy") for m in moved] == [
        (0, 1), (1, 1), (2, "busy"), (3, "busy"),
    ]  # fmt: skip
    assert tested.begin(0, 0.2) == ()
    assert [query.id for query in tested.begin(1, 0.2)] == [4, 0, 1]
    tested.revive(0, 0.2)
    assert tested.place(Query(7, 0.3, 75), 0.3) == 0
    for device in (0, 1):
        tested.take_out(device, Health.DEAD, None, 0.4)
    last = tested.place(Query(8, 0.5, 75), 0.5)
    assert last.retry_after == math.inf
    assert tested.num_waiting == 0


def test_queries_of_a_dead_device_move_before_its_documents():
    tested = manager(Windve(), FAST, SLOW, depths=(2, 1))
    tested.place(Query(0, 0.0, 75, DOCUMENT), 0.0)
    tested.begin(0, 0.0)
    tested.place(Query(1, 0.1, 75, QUERY), 0.1)
    moved = tested.take_out(0, Health.DEAD, None, 0.2)
    assert [m.query.id for m in moved] == [1, 0]
    assert moved[0].place == 1
    assert isinstance(moved[1].place, Busy)


def test_a_batch_that_overruns_is_expected_to_overrun_as_much_again():
    tested = manager(Predicted(LIMIT), FAST, depths=(0,))
    tested.place(Query(0, 0.0, 75), 0.0)
    tested.begin(0, 0.0)
    queue = tested.devices[0]
    assert queue.left(0.005) == pytest.approx(0.1)
    assert queue.left(0.105) == pytest.approx(0.0)
    assert queue.left(0.605) == pytest.approx(0.5)
    assert tested.place(Query(1, 0.61, 75), 0.61) == 0
    assert isinstance(tested.place(Query(2, 1.2, 75), 1.2), Busy), "a device that hangs takes nothing more"


def test_replaced_costs_change_the_next_prediction():
    tested = manager(Predicted(LIMIT), FAST, depths=(0,))
    queue = tested.devices[0]
    assert tested.place(Query(0, 0.0, 75), 0.0) == 0
    assert queue.alone(75) == pytest.approx(0.105)
    queue.replace_costs(Line(0.3, 0.3).new_load)
    assert queue.timed.load.seconds == pytest.approx(0.6)
    assert queue.alone(75) == pytest.approx(0.6)
    assert tested.place(Query(1, 0.0, 75), 0.0) == 0
    assert isinstance(tested.place(Query(2, 0.0, 75), 0.0), Busy)


def test_an_impossible_limit_is_refused():
    with pytest.raises(ConfigError, match="a latency limit of 0 s: must be more than 0"):
        Predicted(0.0)


def test_a_busy_error_keeps_its_time_when_it_crosses_a_process():
    error = pickle.loads(pickle.dumps(BusyError("full", 0.5)))
    assert (str(error), error.retry_after) == ("full", 0.5)
    assert BusyError("full").retry_after is None


@pytest.mark.parametrize("policy", [Predicted(LIMIT), Plain()])
def test_documents_run_beside_queries_that_never_end(policy):
    tested, now, ids, done, num_late = manager(policy, FAST), 0.0, iter(range(1 << 20)), set(), 0
    documents = {next(ids) for _ in range(60)}
    for id in documents:
        assert tested.place(Query(id, 0.0, 75, DOCUMENT), 0.0) == 0
    while not documents <= done:
        batch = tested.begin(0, now)
        for _ in range(80):  # more than the device can take, while the batch runs
            query = Query(next(ids), now, 75, QUERY)
            if isinstance(tested.place(query, now), Busy):
                break
        now += tested.devices[0].left(now)
        num_late += sum(query.priority == QUERY and now > query.arrival + LIMIT for query in batch)
        done |= {query.id for query in tested.finish(0)}
        assert now < 60, f"{len(documents - done)} documents still wait"
    if isinstance(policy, Predicted):
        assert num_late == 0


@pytest.mark.parametrize("policy", [Predicted(LIMIT), Plain()])
def test_documents_beside_queries_that_never_end_get_their_share_and_no_more(policy):
    tested, now, ids, spent = manager(policy, FAST), 0.0, iter(range(1 << 20)), 0.0
    while now < 60:
        for _ in range(20):  # more than their share
            tested.place(Query(next(ids), now, 75, DOCUMENT), now)
        for _ in range(80):
            if isinstance(tested.place(Query(next(ids), now, 75, QUERY), now), Busy):
                break
        tested.begin(0, now)
        now += tested.devices[0].left(now)
        spent += sum(query.priority == DOCUMENT for query in tested.finish(0)) * FAST.alpha
    assert spent / now == pytest.approx(BEHIND_SHARE, rel=0.35)


def test_a_promoted_document_can_be_cancelled_and_moved():
    tested = manager(Predicted(LIMIT), FAST, SLOW)
    for id in range(12):
        tested.place(Query(id, 0.0, 75, DOCUMENT), 0.0)
    for id in range(100, 140):
        tested.place(Query(id, 0.0, 75, QUERY), 0.0)
    batch = tested.begin(0, 0.0)
    assert min(query.priority for query in batch) == QUERY
    (promoted, *_) = (query for query in tested.devices[0].waiting() if query.priority == DOCUMENT)
    assert tested.devices[0].timed
    assert tested.cancel(promoted.id)
    moved = {each.query.id for each in tested.take_out(0, Health.DEAD, None, 0.0)}
    assert promoted.id not in moved
    assert {query.id for query in batch} <= moved
    assert tested.devices[0].num_waiting == 0


def test_a_query_that_is_held_while_no_device_works_is_a_query_when_one_recovers():
    tested = manager(Predicted(LIMIT), FAST)
    tested.devices[0].health = Health.RECOVERING
    query = Query(0, 0.0, 10)
    assert isinstance(tested.place(query, 0.0), Busy)
    assert isinstance(tested.place_late(query, 0.0), Busy)
    assert query.priority == QUERY
    tested.hold(query)
    tested.place_held(0.1)
    assert tested.held == (query,)
    tested.revive(0, 0.2)
    assert tested.held == ()
    assert query.priority == QUERY
    assert (len(tested.devices[0].timed), len(tested.devices[0].bulk)) == (1, 0)


def test_a_query_that_is_held_too_long_runs_late():
    tested = manager(Predicted(LIMIT), FAST)
    tested.devices[0].health = Health.RECOVERING
    query = Query(0, 0.0, 10)
    tested.hold(query)
    tested.place_held(0.1)
    tested.revive(0, 10 * LIMIT)
    assert query.priority == DOCUMENT
    assert (len(tested.devices[0].timed), len(tested.devices[0].bulk)) == (0, 1)

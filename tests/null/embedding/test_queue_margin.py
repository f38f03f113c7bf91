"""Tests that the policy ``predicted`` learns how far predicted costs can be trusted."""

import random

import pytest

from staticllm.pipelines.embedding.queue import policies
from staticllm.pipelines.embedding.queue.device_queue import DOCUMENT, Busy, DeviceQueue, Query
from staticllm.pipelines.embedding.queue.loads import Line
from staticllm.pipelines.embedding.queue.policies import LATE_SHARE, MARGIN, MOST_MARGIN, Predicted
from staticllm.pipelines.embedding.queue.text_queue import TextQueue

LIMIT, COSTS = 1.0, Line(0.01, 0.05, 1.0)


def late_share(noise, num_queries=30_000):
    """Return the share of the admitted queries of a second half that end late, and that of the queries that are refused.

    A batch takes up to ``noise`` times as long as predicted.
    """
    rng, policy = random.Random(0), Predicted(LIMIT)
    queue = DeviceQueue("D", COSTS.new_load)
    manager = TextQueue([queue], policy)
    now, end, ends, num_refused = 0.0, None, [], 0
    for number in range(num_queries):
        now += rng.expovariate(150.0)
        while end is not None and end <= now:
            ends += [end - query.arrival for query in manager.finish(0, end)]
            end = begun(manager, queue, end, rng.uniform(1.0, noise))
        num_refused += isinstance(manager.place(Query(number, now, 75), now), Busy)
        end = end if end is not None else begun(manager, queue, now, rng.uniform(1.0, noise))
    half = ends[len(ends) // 2 :]
    return sum(seconds > LIMIT for seconds in half) / len(half), num_refused / num_queries


def begun(manager, queue, now, factor):
    return now + factor * queue.left(now) if manager.begin(0, now) else None


def test_few_queries_are_late_although_batches_take_longer_than_predicted(monkeypatch):
    late, _ = late_share(1.35)
    assert late <= 2 * LATE_SHARE
    monkeypatch.setattr(policies, "MARGIN_STEP", 0.0)
    assert late_share(1.35)[0] > 0.03, "with a fixed margin"


def test_costs_that_are_right_leave_hardly_any_margin(monkeypatch):
    late, refused = late_share(1.0)
    assert late == 0.0
    monkeypatch.setattr(policies, "MARGIN_STEP", 0.0)
    assert refused <= late_share(1.0)[1]


@pytest.mark.parametrize(
    ("query", "end", "changes"),
    [
        (Query(1, 5.0, 75), 6.1, True),
        (Query(1, 5.0, 75, DOCUMENT), 6.1, False),
        (Query(1, 5.0, 75, deadline=5.5), 6.1, False),
        (Query(1, 5.0, 75, deadline=9.0), 6.1, True),
    ],
)
def test_only_queries_with_the_latency_limit_count(query, end, changes):
    policy = Predicted(LIMIT)
    policy.learn(query, end)
    limit = policy.limit(Query(2, 0.0, 75))
    assert (limit < MARGIN * LIMIT) == changes


def test_the_margin_has_limits():
    policy = Predicted(LIMIT)
    for _ in range(2000):
        policy.learn(Query(1, 0.0, 75), 2.0)
    assert policy.limit(Query(2, 0.0, 75)) == policies.LEAST_MARGIN * LIMIT
    for _ in range(10_000):
        policy.learn(Query(1, 0.0, 75), 0.5)
    assert policy.limit(Query(2, 0.0, 75)) == MOST_MARGIN * LIMIT

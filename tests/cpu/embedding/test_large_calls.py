"""Tests calls with more texts than a pool of devices takes at once: they are told so, instead of trying again forever."""

import math

import pytest
from support.encoders.fake_instances import Adder, request

from staticllm.errors import BusyError, PromptError
from staticllm.pipelines.embedding.pool.pool_loader import make_pool
from staticllm.pipelines.embedding.queue.device_queue import Health
from staticllm.pipelines.embedding.queue.loads import Line
from staticllm.pipelines.embedding.windve.queue_depth import Estimate

LIMIT_S = 0.01
IN_TIME = 32
"""The texts of 8 tokens that an Adder is predicted to embed within the limit."""


def windve(policy="windve"):
    """A pool whose devices have the queue depths 2 and 3."""
    estimates = [Estimate(name, Line(1.0, 0.0), 1.0, LIMIT_S, depth) for name, depth in (("A", 2), ("B", 3))]
    return make_pool([Adder("A"), Adder("B")], policy, LIMIT_S, 1000, estimates)


def predicted():
    return make_pool([Adder("A")], "predicted", LIMIT_S, 1000)


def admit(state, num_texts, now=0.0, **options):
    found = request(*range(20, 20 + num_texts), arrival=now, **{"priority": 1, **options})
    state.queue.admit(found, state.queue.number(found, now), now)


@pytest.mark.parametrize(
    ("make", "most"),
    [(windve, 5), (lambda: windve("windve_q"), 5), (predicted, IN_TIME)],
    ids=["windve", "q", "predicted"],
)
def test_a_call_that_never_fits_is_told_how_many_texts_do(make, most):
    state = make()
    message = rf"a call of {most + 1} texts: also when they are idle, the devices take only the first {most} .* split the call"
    with pytest.raises(PromptError, match=message) as raised:
        admit(state, most + 1)
    assert "\n" not in str(raised.value)
    assert not hasattr(raised.value, "retry_after")
    assert state.queue.num_waiting == 0
    admit(state, most)
    assert state.queue.num_waiting == most
    with pytest.raises(BusyError) as busy:
        admit(state, 2)
    assert busy.value.retry_after < math.inf
    with pytest.raises(PromptError, match=f"the first {most}"):
        admit(state, 10 * most)


def test_a_deadline_that_idle_devices_miss_is_never_met_later():
    with pytest.raises(PromptError, match=r"take only the first 4 of them .* or the deadline"):
        admit(predicted(), 300, priority=0, deadline=1.2e-3)
    with pytest.raises(BusyError, match="its deadline is in") as raised:
        admit(predicted(), 1, priority=0, deadline=1e-6)
    assert raised.value.retry_after == math.inf


def test_a_device_that_recovers_counts():
    state = windve()
    state.devices[1].queue.health = Health.RECOVERING
    with pytest.raises(BusyError):
        admit(state, 5)
    with pytest.raises(PromptError, match="the first 5"):
        admit(state, 6)

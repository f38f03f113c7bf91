"""Tests that the engine takes every moment from the clock that it is given, and deadlines and think times with it."""

from itertools import count

import pytest

from staticllm.core import FinishReason
from staticllm.pipelines.engine.client_sequences.state import FeedOrder
from staticllm.pipelines.engine.engine import new_state
from staticllm.pipelines.engine.engine_core import EngineCore
from staticllm.pipelines.engine.options import EngineOptions
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.pipelines.generation.beam_search import BeamParams
from staticllm.pipelines.profiling.records import RequestRecord, StepRecord
from staticllm.pipelines.scheduling.policies.dynamic import Dynamic
from staticllm.pipelines.scheduling.request_table import Limits
from staticllm.testing import FAKE_VARIANTS, VOCAB_SIZE, fake_runner

START = 1e9
"""A moment that ``time.perf_counter`` never shows."""


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self):
        self.now = START

    def __call__(self):
        return self.now


@pytest.fixture
def core():
    runner, clock = fake_runner(FAKE_VARIANTS), Clock()
    runner.clock = clock
    made = EngineCore(runner, Dynamic(), EngineOptions(Limits(4), 64, host_kv_slots=64, measure_costs=False), clock)
    made.profiler.trace = []
    return made


def state_of(core, prompt, **options):
    return new_state(EngineRequest(prompt, arrival=START, **options), VOCAB_SIZE, clock=core.clock)


def test_every_moment_in_records_is_one_of_the_clock(core):
    core.admit(state_of(core, (1, 2, 3), max_new_tokens=4))
    core.admit(state_of(core, (4, 5), max_new_tokens=3, num_sequences=2))
    core.admit(state_of(core, (6, 7), max_new_tokens=3, num_sequences=2, beams=BeamParams(2)))
    steps = count(1)
    while core.requests:
        core.clock.now = START + next(steps)
        core.step()
    requests = [record for record in core.profiler.trace if isinstance(record, RequestRecord)]
    assert len(requests) == 4
    for record in requests:
        moments = [record.started, *record.token_times, record.ended]
        assert moments == sorted(moments)
        assert all(START < moment < START + next(steps) for moment in moments)
    calls = [record for record in core.profiler.trace if isinstance(record, StepRecord)]
    assert [call.start for call in calls] == [START + number + 1 for number in range(len(calls))]
    assert {call.host.total for call in calls} == {0.0}, "no time has passed between two calls"


def test_a_deadline_is_a_moment_of_the_clock(core):
    state = state_of(core, (1, 2, 3), deadline=START + 5)
    core.admit(state)
    for seconds in (1, 4, 5):
        core.clock.now = START + seconds
        core.step()
    (record,) = (record for record in core.profiler.trace if isinstance(record, RequestRecord))
    assert record.reason is FinishReason.DEADLINE
    assert record.token_times == (START + 1, START + 4)


def test_think_times_are_measured_with_the_clock(core):
    state, results = core.feeds.open(), []
    assert state.idle_since == START
    for token in (1, 2):
        core.clock.now += 0.1
        core.feeds.feed(state, FeedOrder((token,), "last", results.append, core.clock()))
        core.clock.now += 1
        core.step()
    assert len(results) == 2
    assert state.idle_since == core.clock.now
    assert state.view.ready_at == pytest.approx(core.clock.now + 0.1 + 0.05)

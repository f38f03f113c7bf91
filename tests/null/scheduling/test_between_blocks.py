"""Tests the rule that puts decode steps between the blocks of a call, and what it costs, with the engine on a virtual clock."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.scheduling.between_blocks import MAX_DELAY_SHARE, due_step
from staticllm.pipelines.scheduling.interface import CallView, Device, Plan, RequestView, TokenBound, View
from staticllm.pipelines.scheduling.planner import POLICIES
from staticllm.pipelines.simulator.cluster import Scenario, configured_model
from staticllm.pipelines.simulator.cost_model import Blocks, HostCost
from staticllm.pipelines.simulator.workload import Arrival

STEP, BLOCK = 0.010, 0.004
SIZES = tuple(Variant(rows, 512, rows) for rows in (1, 4))


def run(call_seconds, bound, tpot_ms=None, waited=0.0, num_blocks=50, own=0.0, delay=0.0, num_running=2):
    """Return after how many seconds of its own a call is interrupted, each time for a step of ``STEP`` seconds."""
    now, last, done, inserted = 100.0, 100.0 - waited, 0.0, []
    for number in range(1, num_blocks):
        now += call_seconds / num_blocks
        done += call_seconds / num_blocks
        running = tuple(RequestView(i, "running", 0.0, 9, 8, 8, 2, last) for i in range(num_running))
        device = Device(VariantIndex(SIZES), lambda variant: STEP, 64, num_blocks=num_blocks)
        view = View(now, (), (), running, (), 4, 99, 0, device, tpot_ms=tpot_ms, token_bound=bound)
        start = 100.0 - own - delay
        call = CallView(Variant(64, 0), call_seconds, num_blocks, number, len(inserted), SIZES, start, own + done)
        plan = due_step(view, call)
        if plan is not None:
            assert plan == Plan(decode=tuple(range(num_running)))
            inserted.append(done)
            now += STEP
            last = now
    return inserted


def test_steps_keep_the_bound_and_are_evenly_spaced():
    bound = TokenBound(4.0, 0.06)
    assert run(0.04, bound) == [], "the tokens after the call are early enough"
    (first,) = run(0.09, bound)
    assert first == pytest.approx(0.045, abs=0.002)
    assert len(run(0.2, bound, tpot_ms=60.0)) == 3
    gaps = [after - before for before, after in pairwise([0.0, *run(0.2, bound, tpot_ms=60.0), 0.2])]
    assert max(gaps) + STEP <= 0.06 + BLOCK / 2 + 1e-9
    assert max(gaps) - min(gaps) <= 2 * BLOCK


def test_time_that_a_request_has_waited_counts():
    assert run(0.04, TokenBound(4.0, 0.06), waited=0.03, own=0.1) != []
    assert run(0.04, TokenBound(4.0, 0.06), waited=0.0, own=0.1) == []


def test_a_prompt_is_delayed_by_at_most_its_share():
    tight = TokenBound(1.0, 0.02)
    assert len(run(0.2, tight)) == int(MAX_DELAY_SHARE * 0.2 / STEP) == 4
    assert run(0.2, tight, delay=0.04) == [], "decode steps between calls have used it up"
    assert run(0.04, tight) == [], "not even one step is allowed"
    assert len(run(0.04, tight, own=0.16)) == 3, "earlier calls of the same prompt count"
    assert len(run(0.2, tight, tpot_ms=20.0)) > 15, "a target of the user goes first"


def test_nothing_is_due_without_requests_slots_or_programs():
    assert run(0.2, TokenBound(1.0, 0.02), num_running=0) == []
    device = Device(VariantIndex(SIZES), lambda variant: STEP, 64, num_blocks=9)
    running = tuple(RequestView(i, "running", 0.0, 9, 8, 8, 2, 90.0 + i) for i in range(6))
    view = View(100.0, (), (), running, (), 8, 99, 0, device)
    call = CallView(Variant(64, 0), 1.0, 9, 4, 0, SIZES, 99.5, 0.5)
    assert due_step(view, call) == Plan(decode=(0, 1, 2, 3)), "those that have waited longest"
    assert due_step(replace(view, free_slots=2), call) == Plan(decode=(0, 1))
    assert due_step(replace(view, free_slots=0), call) is None
    assert due_step(view, replace(call, steps=())) is None


@settings(deadline=None)
@given(
    call=st.floats(0.001, 2.0),
    bound=st.floats(0.0, 0.5),
    steps=st.floats(0.5, 5.0),
    tpot_ms=st.none() | st.floats(1.0, 500.0),
    waited=st.floats(0.0, 1.0),
    own=st.floats(0.0, 2.0),
    delay=st.floats(0.0, 1.0),
    num_blocks=st.integers(2, 40),
)
def test_the_share_is_never_exceeded(call, bound, steps, tpot_ms, waited, own, delay, num_blocks):
    share = MAX_DELAY_SHARE if tpot_ms is None else 1.0
    inserted = run(call, TokenBound(steps, bound), tpot_ms, waited, num_blocks, own, delay)
    assert len(inserted) * STEP <= max(0.0, share * (own + call) - delay) + 1e-6


def model(num_blocks, tpot_ms=None):
    config = StaticLLMConfig(max_prompt_len=1024, min_response_len=128, tpot_ms=tpot_ms)
    found = configured_model(config, "separate", cost, HostCost(), "blocks")
    return replace(found, blocks=Blocks(num_blocks, lambda variant: 0.002))


def cost(variant):
    return 0.010 + 0.0002 * variant.rows


CHATS = tuple(Arrival(i, 0.1 * i, 60, 100) for i in range(2))


def beside(policy, num_blocks, tpot_ms=None):
    """Return the longest gap of two chats beside a prompt of 1000 tokens, its TTFT, and the records of the calls."""
    found = Scenario(model(num_blocks, tpot_ms), (*CHATS, Arrival(9, 0.5, 1000, 2))).run(policy)
    records = {record.id: record for record in found.requests}
    return max(records[0].longest_gap, records[1].longest_gap), records[9].ttft, found.steps[0]


@pytest.mark.parametrize("name", ["dynamic", "fcfs", "prefill_first"])
def test_preemption_bounds_gaps_at_the_cost_of_a_fifth_of_the_first_token(name):
    alone = Scenario(model(1), (Arrival(9, 0.5, 1000, 2),)).run(name).requests[0].ttft
    assert alone == pytest.approx(0.2148)
    gap, ttft, steps = beside(name, 24)
    inserted = [step for step in steps if step.is_inserted]
    assert 1 <= len(inserted) <= 3
    assert gap <= 0.1 + 0.2 / 24
    assert ttft <= (1 + MAX_DELAY_SHARE) * alone + cost(Variant(16, 1152, 16)), (
        "and a step that runs when the prompt arrives"
    )
    (call,) = (step for step in steps if step.num_inserted)
    assert call.seconds == pytest.approx(alone)
    assert call.paused_seconds == pytest.approx(sum(step.seconds for step in inserted))
    assert all(call.start < step.start and step.end < call.end for step in inserted)
    assert sum(step.seconds for step in steps) <= steps[-1].end


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_calls_in_one_piece_have_no_steps_between_blocks(name):
    assert not any(step.is_inserted or step.num_inserted for step in beside(name, 1)[2])


def test_a_target_makes_gaps_shorter():
    gaps = [beside("fcfs", 24, tpot_ms)[0] for tpot_ms in (None, 60.0, 40.0)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[1] <= 0.06 + 0.2 / 24
    assert gaps[2] <= 0.04 + 0.2 / 24


def test_every_token_of_a_run_in_blocks_is_there():
    arrivals = (*CHATS, *(Arrival(10 + i, 0.3 + 0.4 * i, 300 + 150 * i, 40) for i in range(5)))
    for name in sorted(POLICIES):
        found = Scenario(model(8, 40.0), arrivals).run(name)
        assert [len(record.token_times) for record in sorted(found.requests, key=lambda r: r.id)] == [100] * 2 + [
            40
        ] * 5
        assert all(before < after for record in found.requests for before, after in pairwise(record.token_times))

"""Tests the planner of drafts alone: what it charges them for, what rules them out, and for how long."""

from dataclasses import replace

import pytest

from staticllm.core import Variant
from staticllm.pipelines.engine.speculation.draft_planner import (
    ALLOWANCE,
    MAX_CREDIT,
    MAX_SURPLUS,
    PROBE_AFTER,
    PROBE_RARELY_AFTER,
    DraftPlan,
    DraftPlanner,
    PlainCall,
)
from staticllm.pipelines.generation.drafts import Draft, DraftParams
from staticllm.testing import fake_request, fake_runner

ONE, EIGHT = Variant(1, 64, 1), Variant(8, 64, 8)
STEP = 0.01
PLAIN = PlainCall(ONE, 1, 1, 1, 1)
UNIT = [5, 6, 7, 8]


@pytest.fixture
def planner():
    """A planner for a device whose steps take 10 ms, and 12 ms with eight rows."""
    runner = fake_runner((ONE, EIGHT))
    runner.costs.set(ONE, STEP)
    runner.costs.set(EIGHT, 1.2 * STEP)
    found = DraftPlanner(runner, 64)
    for _ in range(3):
        found.observe(DraftPlan(PLAIN, ONE), 0, STEP)
    return found


@pytest.fixture
def state():
    """An answer whose text repeats itself, so that at least five tokens are drafted."""
    request = fake_request(UNIT * 3, 40, drafts=DraftParams(max_ngram_size=3))
    return request.state


def drafted(planner, state):
    plan = planner.plan([state], PLAIN)
    return plan, sum(len(draft.tokens) for draft in plan.drafts)


def check(planner, state, num_accepted, seconds=1.2 * STEP):
    """Let one draft be checked, as the engine does it."""
    plan, count = drafted(planner, state)
    assert count > 0
    planner.observe(plan, num_accepted, seconds)
    state.drafts.observe(plan.drafts[0], num_accepted)


def test_the_first_slow_run_at_a_size_rules_drafts_out_for_no_longer_than_others(planner, state):
    planner.runner.costs.doubt(EIGHT)
    check(planner, state, 7, seconds=20 * STEP)
    assert drafted(planner, state)[1] >= 5
    planner.runner.costs.set(EIGHT, 1.2 * STEP)
    check(planner, state, 7)
    assert planner.overheads.drafted <= 0.2 * STEP


def test_drafts_are_charged_what_the_call_took_and_not_what_it_should_have_taken(planner, state):
    credit = planner.credit.steps
    check(planner, state, 0, seconds=1.7 * STEP)
    assert planner.credit.steps == pytest.approx(credit + ALLOWANCE - 0.7)
    planner.observe(DraftPlan(PLAIN, ONE), 0, 1.4 * STEP)
    assert planner.credit.steps == pytest.approx(credit + 2 * ALLOWANCE - 1.1), "the device changed back to the size"
    planner.observe(DraftPlan(PLAIN, ONE), 0, 1.4 * STEP)
    assert planner.credit.steps == pytest.approx(credit + 3 * ALLOWANCE - 1.1), "other work made this one slow"


def test_what_drafts_gained_for_an_answer_pays_for_its_next_mistakes_only(planner, state):
    for _ in range(3):
        check(planner, state, 7)
    assert (planner.credit.steps, state.drafts.surplus) == (MAX_CREDIT, MAX_SURPLUS)
    for _ in range(4):
        check(planner, state, 0, seconds=2 * STEP)
    assert state.drafts.surplus == pytest.approx(MAX_SURPLUS - 4)
    assert planner.credit.steps == MAX_CREDIT
    other = fake_request(UNIT * 3, 40, drafts=DraftParams(max_ngram_size=3)).state
    assert other.drafts.surplus == 0


def test_without_surplus_and_credit_nothing_is_drafted_until_enough_steps_have_passed(planner, state):
    planner.credit.steps = -0.5
    assert drafted(planner, state)[1] == 0
    for _ in range(round(1.2 / ALLOWANCE)):
        planner.skip()
    assert drafted(planner, state)[1] >= 5


def test_a_likely_draft_needs_less_credit_than_an_unlikely_one(planner, state):
    planner.runner.costs.set(EIGHT, 2 * STEP)
    planner.credit.steps = 0.3
    assert drafted(planner, state)[1] == 0, "six in ten are right: four tenths of a step may be lost"
    for _ in range(4):
        state.drafts.rates_among(planner.rates).observe(Draft(tuple(range(7)), "lookup 3"), 7)
    assert drafted(planner, state)[1] >= 5


def test_a_draft_that_promises_nothing_is_tried_rarely(planner, state):
    rates = state.drafts.rates_among(planner.rates)
    for _ in range(9):
        rates.observe(Draft(tuple(range(7)), "lookup 3"), 0)
    planner.runner.costs.set(EIGHT, 1.6 * STEP)
    planner.credit.num_plain = PROBE_AFTER
    planner.credit.steps = MAX_CREDIT
    assert drafted(planner, state)[1] == 0
    planner.credit.num_plain = PROBE_RARELY_AFTER
    assert drafted(planner, state)[1] > 0


def test_a_call_of_several_answers_has_their_mean_surplus(planner, state):
    other = fake_request(range(9), 40, drafts=DraftParams(max_ngram_size=3)).state
    state.drafts.surplus = 2.0
    plan = DraftPlan(replace(PLAIN, num_decoding=2), EIGHT, (Draft((1,), "x"),), answers=[state.drafts, other.drafts])
    credit = planner.credit.steps
    planner.observe(plan, 0, 1.6 * STEP)
    assert planner.credit.steps > credit - 0.6, "a part of the loss was paid by the surplus"
    assert 1.0 <= state.drafts.surplus < 2.0
    assert other.drafts.surplus == 0.0

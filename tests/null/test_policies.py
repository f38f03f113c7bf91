"""Plans: every rule is held, whatever breaks one never reaches the device, and what the shipped policies decide."""

import itertools
import re
import threading
import time
import warnings
from dataclasses import replace

import pytest

from staticllm.core import Variant
from staticllm.errors import ConfigError, DeviceError
from staticllm.pipelines.scheduling import planner as planner_module
from staticllm.pipelines.scheduling.planner import POLICIES, Planner, make_policy
from staticllm.pipelines.scheduling.rules import IllegalPlanError, check
from staticllm.pipelines.scheduling.view import Device, Plan, RequestView, View
from staticllm.pipelines.variants import VariantIndex
from staticllm.testing import (
    FAKE_VARIANTS,
    add_program,
    assert_empty,
    fake_answer,
    fake_engine,
    fake_request,
    run_to_end,
)

INDEX = VariantIndex(FAKE_VARIANTS)


def letters_of(request):
    return list(iter(lambda: request.mailbox.get(0), None))


def seconds(variant):
    return (8 + variant.rows) * 1e-3


def a_view(**changes):
    """1 waits, 2 prefills, 3 and 4 run, 5 is parked outside the arena."""
    view = View(
        now=100.0,
        waiting=(RequestView(1, "waiting", 99.0, 10),),
        prefilling=(RequestView(2, "prefilling", 98.0, 20, 16, 16),),
        running=tuple(RequestView(i, "running", 90.0 + i, 12, 11, 11, 3, 99.99) for i in (3, 4)),
        parked=(RequestView(5, "parked", 97.0, 9, 8, 0, 1, 99.5, in_arena=False),),
        max_num_seqs=3,
        free_rows=40,
        free_parked_rows=50,
        device=Device(INDEX, seconds, 64),
    )
    return replace(view, **changes)


@pytest.mark.parametrize(
    ("rule", "plan", "changes"),
    [
        ("is-a-plan", "decode everybody", {}),
        ("is-a-plan", Plan(decode=([],)), {}),
        ("is-a-plan", Plan(prefill=((1, 2, 3),)), {}),
        ("known-requests", Plan(decode=(9,)), {}),
        ("known-requests", Plan(prefill=((9, 1),)), {}),
        ("named-once", Plan(decode=(3, 3)), {}),
        ("resume-parked", Plan(decode=(3,), resume=(4,)), {}),
        ("park-running", Plan(decode=(3,), park=(2,)), {}),
        ("one-fate", Plan(decode=(3,), park=(4,), evict=(4,)), {}),
        ("decode-has-slot", Plan(decode=(5,)), {}),
        ("decode-has-slot", Plan(decode=(1,)), {}),
        ("decode-has-slot", Plan(decode=(3,), park=(3,)), {}),
        ("prefill-unfinished", Plan(prefill=((3, 1),)), {}),
        ("prefill-unfinished", Plan(prefill=((2, 1),), evict=(2,)), {}),
        ("prefill-count", Plan(prefill=((2, 5),)), {}),
        ("prefill-count", Plan(prefill=((2, 0),)), {}),
        ("prefill-count", Plan(prefill=((2, 1.5),)), {}),
        ("runs-something", Plan(), {}),
        ("runs-something", Plan(resume=(5,)), {}),
        ("slots", Plan(decode=(3,), resume=(5,)), {"max_num_seqs": 2}),
        ("rows", Plan(prefill=((1, 10),)), {"free_rows": 9}),
        ("rows", Plan(decode=(3,), resume=(5,)), {"free_rows": 8}),
        ("parked-rows", Plan(decode=(3,), park=(4,)), {"free_parked_rows": 10}),
        ("holds", Plan(decode=(3, 4), prefill=((1, 10), (2, 4))), {"device": Device(INDEX, seconds, 999)}),
    ],
)
def test_every_rule_is_held(rule, plan, changes):
    with pytest.raises(IllegalPlanError) as error:
        check(plan, a_view(**changes))
    assert error.value.rule == rule and rule in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(decode=(3, 4), prefill=((2, 4), (1, 10))),
        Plan(decode=(3, 5), resume=(5,), park=(4,)),
        Plan(prefill=((1, 1),), evict=(3, 4, 2, 5)),
        Plan(decode=(5,), resume=(5,), evict=(3,)),
    ],
)
def test_legal_plans_pass(plan):
    assert check(plan, a_view()) is plan


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("free_rows", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("free_parked_rows", [0, 50])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("without", [(), ("running",), ("waiting", "prefilling"), ("running", "prefilling", "waiting")])
def test_shipped_policies_break_no_rule_when_rows_run_short(name, free_rows, free_parked_rows, slots, without):
    view = a_view(free_rows=free_rows, free_parked_rows=free_parked_rows, max_num_seqs=slots)
    view = replace(replace(view, running=view.running[:slots]), **dict.fromkeys(without, ()))
    if not view.requests:
        return
    held = sorted(request.own_rows for request in view.requests)[:-1]
    if free_rows + sum(held) < 9:
        view = replace(view, free_rows=9)  # one request alone never fills the arena
    check(make_policy(name).plan(view), view)


# -- policies that fail


class Raises:
    def plan(self, view):
        raise ZeroDivisionError("mine")


class RaisesLater(Raises):
    calls = 0

    def plan(self, view):
        self.calls += 1
        return make_policy("fcfs").plan(view) if self.calls < 5 else super().plan(view)


class Nonsense:
    def plan(self, view):
        return Plan(decode=(123456,))


class Nothing:
    def plan(self, view):
        return None


class Exits:
    def plan(self, view):
        raise SystemExit(3)


class Endless:
    def plan(self, view):
        return Plan(decode=itertools.count())


class EndlessPrompts:
    def plan(self, view):
        return Plan(prefill=((request.id, 1) for request in itertools.cycle(view.requests)))


class ChangesTheView:
    def plan(self, view):
        object.__setattr__(view, "running", ())
        for request in view.requests:
            object.__setattr__(request, "num_rows", 1000)
        view.device.index.sizes = ()
        view.device.index._ladders.clear()
        return Plan()


class EmptiesTheCosts:
    def plan(self, view):
        view.device.seconds._measured.clear()
        return Plan()


HOSTILE = [Raises, RaisesLater, Nonsense, Nothing, Exits, Endless, EndlessPrompts, ChangesTheView, EmptiesTheCosts]


@pytest.mark.parametrize("policy", HOSTILE)
def test_a_failing_policy_is_replaced_with_one_warning_and_requests_finish(policy):
    engine = fake_engine(policy())
    requests = [fake_request(range(i, i + 12), 6) for i in range(5)]
    expected = [fake_answer(request.tokens, 6) for request in requests]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_to_end(engine, requests)
    engine.close()
    assert [request.tokens for request in requests] == expected
    (warning,) = caught
    assert f"the scheduler {policy.__name__} is replaced by fcfs" in str(warning.message)
    assert not [thread for thread in threading.enumerate() if thread.name == "staticllm-policy"]


def test_a_policy_that_could_not_plan_with_what_was_there_comes_back():
    """It plans for four slots, which is legal; the program for it is still being compiled, which is our fault."""

    class AllTogether:
        num_plans = 0

        def plan(self, view):
            self.num_plans += 1
            plan = make_policy("fcfs").plan(view)
            return replace(plan, decode=tuple(r.id for r in view.running)) if plan.decode and not plan.resume else plan

    policy = AllTogether()
    engine = fake_engine(policy, 4, is_staged=True)
    requests = [fake_request(range(i, i + 9), 12) for i in range(4)]
    expected = [fake_answer(request.tokens, 12) for request in requests]
    engine.enqueue(requests)
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(20):
            engine.step()
    (warning,) = caught
    assert "AllTogether is replaced by fcfs until more programs are compiled: rule 'holds'" in str(warning.message)
    before = policy.num_plans
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for variant in list(engine.runner.programs.late):
            add_program(engine.runner, variant)
        run_to_end(engine, [])
    engine.close()
    assert policy.num_plans > before, "it plans again"
    assert [request.tokens for request in requests] == expected


def test_a_shipped_policy_that_fails_loses_one_step(monkeypatch):
    plan, calls = POLICIES["dynamic"].plan, []

    def failing(self, view):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("ours")
        return plan(self, view)

    monkeypatch.setattr(POLICIES["dynamic"], "plan", failing)
    engine = fake_engine(make_policy("dynamic"))
    request = fake_request([1, 2, 3], 9)
    with pytest.warns(
        RuntimeWarning, match="Dynamic is replaced by fcfs for a step: it raised ZeroDivisionError"
    ):
        run_to_end(engine, [request])
    assert len(calls) > 8 and request.tokens == fake_answer([1, 2, 3], 9)


def test_an_illegal_plan_of_the_fallback_costs_a_step_and_not_the_requests(monkeypatch):
    def illegal(self, view):
        return Plan(decode=(123,))

    for name in POLICIES:
        monkeypatch.setattr(POLICIES[name], "plan", illegal)
    engine = fake_engine(make_policy("dynamic"), 2)
    requests = [fake_request(range(20 * i, 20 * i + 18), 6) for i in range(5)]
    with pytest.warns(RuntimeWarning, match="for a step: rule 'known-requests'"):
        run_to_end(engine, requests)
    assert [request.tokens for request in requests] == [fake_answer(range(20 * i, 20 * i + 18), 6) for i in range(5)]
    assert_empty(engine)


def test_a_request_that_no_program_can_run_ends_alone(monkeypatch):
    engine = fake_engine(make_policy("dynamic"))
    stuck, fine = fake_request(range(10), 4), fake_request(range(50, 60), 4)
    engine.enqueue([stuck, fine])
    check = planner_module.check

    def refuses_the_first(plan, view):
        if isinstance(plan, Plan) and stuck.id in (*plan.decode, *(request for request, _ in plan.prefill)):
            raise IllegalPlanError("holds", "no program holds it")
        if any(request.id == stuck.id for request in view.requests):
            raise IllegalPlanError("holds", "nor anything beside it")
        return check(plan, view)

    monkeypatch.setattr(planner_module, "check", refuses_the_first)
    with pytest.warns(RuntimeWarning):
        run_to_end(engine, [])
    end = letters_of(stuck)[-1]
    assert isinstance(end.error, DeviceError) and "no program can run request" in str(end.error)
    assert fine.tokens == fake_answer(range(50, 60), 4)


def test_a_policy_that_stalls_is_replaced(monkeypatch):
    monkeypatch.setattr(planner_module, "STALL_SECONDS", 0.05)
    release = threading.Event()

    class Stalls:
        def plan(self, view):
            release.wait(5)
            return Plan()

    engine = fake_engine(Stalls())
    request = fake_request([1, 2, 3], 4)
    start = time.monotonic()
    with pytest.warns(RuntimeWarning, match="took longer than"):
        run_to_end(engine, [request])
    assert request.tokens == fake_answer([1, 2, 3], 4) and time.monotonic() - start < 2
    release.set()
    engine.close()


def test_a_policy_cannot_change_what_it_sees():
    view = a_view()
    with pytest.raises(AttributeError):
        view.running[0].num_rows = 0
    with pytest.raises(AttributeError):
        view.free_rows = 10_000


@pytest.mark.parametrize("scheduler", ["fifo", None, 5, POLICIES["fcfs"], object()])
def test_what_is_no_policy_is_refused(scheduler):
    with pytest.raises(ConfigError, match="must be one of dynamic, fcfs"):
        make_policy(scheduler)


def test_policies_of_ours_need_no_thread():
    before = threading.active_count()
    planner = Planner(make_policy("dynamic"))
    assert threading.active_count() == before
    planner.close()


# -- what they decide


def test_fcfs_holds_a_slot_from_the_first_token_to_the_last():
    view = a_view()  # two run, one prefills, one is parked: four hold three slots
    assert make_policy("fcfs").plan(view).prefill == ((2, 4),)
    busy = replace(view, prefilling=())
    plan = make_policy("fcfs").plan(busy)
    assert plan.decode == (3, 4, 5) and plan.resume == (5,) and not plan.prefill


def test_prefill_first_lets_nobody_decode_before_prompts():
    plan = make_policy("prefill_first").plan(a_view())
    assert plan.prefill and not plan.decode


def test_decode_first_uses_idle_rows_only():
    plan = make_policy("decode_first").plan(a_view(max_num_seqs=2, device=Device(INDEX, seconds, 40)))
    assert plan.decode == (3, 4) and not plan.prefill, "two rows decode in a call of two"
    alone = make_policy("decode_first").plan(a_view(running=(), parked=()))
    assert alone.prefill and not alone.decode


def test_chunked_fills_up_a_budget():
    plan = make_policy("chunked").plan(a_view())
    assert plan.decode == (3, 4, 5) and plan.prefill == ((2, 4), (1, 9)), "sixteen rows, answers first"


def slow_prompts(variant):
    """Prompts cost much more than tokens: 10 ms a step of decoding, 50 ms for four rows, 100 ms for eight, 200 for sixteen."""
    return 0.01 if variant.rows <= 2 else variant.rows / 80


def test_dynamic_prefills_on_arrival_though_all_slots_are_taken():
    view = a_view(max_num_seqs=2, now=100.0)
    plan = make_policy("dynamic").plan(view)
    assert {request for request, _ in plan.prefill} >= {2}


@pytest.mark.parametrize(
    ("tpot_ms", "waited", "prefills"), [(None, 0.0, True), (15, 0.0, False), (300, 0.0, True), (300, 0.29, False)]
)
def test_dynamic_keeps_nobody_waiting_for_longer_than_the_target(tpot_ms, waited, prefills):
    device = Device(VariantIndex(v for v in FAKE_VARIANTS if v.rows <= 8), slow_prompts, 64)
    running = tuple(replace(request, last_token_time=100.0 - waited) for request in a_view().running)
    policy = make_policy("dynamic")
    policy._prefill_end, policy._prefill_seconds = 100.0 - waited - 1e-6, 1.0  # prompts had their share
    gap = {} if tpot_ms is None else {"tpot_ms": tpot_ms}
    if tpot_ms is None:
        device = replace(device, seconds=lambda variant: 0.01 if variant.rows <= 2 else 0.02)
    plan = policy.plan(a_view(parked=(), running=running, device=device, **gap))
    assert bool(plan.prefill) is prefills


def test_dynamic_never_starves_prompts_of_a_target_that_no_call_keeps():
    device = Device(INDEX, slow_prompts, 64)
    policy, now, prefilled = make_policy("dynamic"), 100.0, 0.0
    for _ in range(200):
        view = a_view(now=now, parked=(), device=device, tpot_ms=15, max_num_seqs=2)
        running = tuple(replace(request, last_token_time=now) for request in view.running)
        plan = policy.plan(replace(view, running=running))
        variant = device.call(plan.num_rows, plan.num_sequences)
        now += slow_prompts(variant)
        prefilled += slow_prompts(variant) if plan.prefill else 0.0
    assert 0.1 < prefilled / (now - 100.0) < 0.4


def test_dynamic_lets_short_prompts_wait_for_company_while_all_slots_are_taken():
    device = Device(INDEX, lambda variant: 0.02 if variant.rows > 2 else 0.01, 64)  # sixteen rows cost what four do
    view = a_view(now=99.001, prefilling=(), parked=(), max_num_seqs=2, device=device)
    short = tuple(RequestView(10 + i, "waiting", 99.0, 4) for i in range(4))
    assert not make_policy("dynamic").plan(replace(view, waiting=short[:1])).prefill
    assert len(make_policy("dynamic").plan(replace(view, waiting=short)).prefill) == 4
    assert make_policy("dynamic").plan(replace(view, waiting=short[:1], now=105.0)).prefill, "but not for ever"
    assert make_policy("dynamic").plan(replace(view, waiting=short[:1], max_num_seqs=3)).prefill, "a slot is free"


@pytest.mark.parametrize(("slots", "num_tokens", "is_alone"), [(6, 4, True), (2, 4, False), (6, 40, False)])
def test_dynamic_fills_free_slots_before_a_step_that_would_leave_them_empty(slots, num_tokens, is_alone):
    """A mixed call adds less than a call of prompts alone takes; but its tokens for two of six slots are worth little."""

    def cost(variant):
        return (
            variant.rows * 1e-3 if not variant.capacity else 0.01 if variant.rows <= 2 else 8e-3 + 0.9e-3 * variant.rows
        )

    waiting = tuple(RequestView(10 + i, "waiting", 99.0, num_tokens) for i in range(4))
    changes = {"waiting": waiting, "prefilling": (), "parked": (), "max_num_seqs": slots, "free_rows": 400}
    plan = make_policy("dynamic").plan(a_view(device=Device(INDEX, cost, 64), **changes))
    assert plan.prefill and (not plan.decode) is is_alone


def test_the_variant_of_a_plan_is_the_smallest():
    assert Device(INDEX, seconds, 30).call(3, 3) == Variant(4, 32, 4)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_nobody_begins_a_prompt_that_could_only_be_evicted(name):
    """Few rows and a short shelf: every prompt runs once."""
    engine = fake_engine(make_policy(name), 2, capacity=60, parked_rows=40)
    requests = [fake_request(range(30 * i, 30 * i + 28), 24) for i in range(12)]
    run_to_end(engine, requests)
    stats = engine.profiler.stats()
    rows_run = stats.prefill_rows_per_second * stats.prefill_share * stats.device_seconds
    assert rows_run == pytest.approx(12 * 28), "prompts were evicted and computed again"


def test_the_policy_in_the_documentation_works(root):
    page = (root / "docs" / "scheduling.md").read_text(encoding="utf-8")
    serving, policy, trial = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(policy.strip().splitlines()) <= 30
    scope = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(policy + trial, scope)
        engine = fake_engine(scope["ShortestFirst"](), max_num_seqs=2)
        requests = [fake_request(range(i, i + 40 - 3 * i), 12) for i in range(10)]
        expected = [fake_answer(request.tokens, 12) for request in requests]
        run_to_end(engine, requests)
    engine.close()
    scope["engine"].close()
    assert [request.tokens for request in requests] == expected
    compile(serving, "docs/scheduling.md", "exec")

"""Tests policies that raise, stall, never return, or change the view: the engine and its requests continue."""

import itertools
import threading
import time
import warnings
from dataclasses import replace

import pytest
from support.engine.output_queues import outputs_of

from staticllm.errors import ConfigError, DeviceError
from staticllm.pipelines.scheduling import planner as planner_module
from staticllm.pipelines.scheduling.interface import Plan
from staticllm.pipelines.scheduling.planner import POLICIES, Planner, make_policy
from staticllm.pipelines.scheduling.plans import IllegalPlanError
from staticllm.testing import add_program, assert_empty, fake_answer, fake_engine, fake_request, run_to_end


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
            object.__setattr__(request, "num_computed", 1000)
        view.device.index.sizes = ()
        view.device.index.buckets.clear()
        return Plan()


class ChangesTheCosts:
    def plan(self, view):
        view.device.seconds.update(view.device.index.variants[0], 99.0)
        return Plan(decode=tuple(request.id for request in view.running))


class SlowId(int):
    def __hash__(self):
        time.sleep(30)
        return 1


class HashesSlowly:
    def plan(self, view):
        return Plan(decode=tuple(SlowId(request.id) for request in view.running), prefill=((SlowId(1), 1),))


class UnspeakableError(Exception):
    def __repr__(self):
        raise ValueError("not even this")


class RaisesWhatCannotBeShown:
    def plan(self, view):
        raise UnspeakableError


HOSTILE = [
    HashesSlowly,
    RaisesWhatCannotBeShown,
    Raises,
    RaisesLater,
    Nonsense,
    Nothing,
    Exits,
    Endless,
    EndlessPrompts,
    ChangesTheView,
    ChangesTheCosts,
]


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
    assert all(seconds < 50 for seconds in engine.runner.costs.measured.values())
    assert not [thread for thread in threading.enumerate() if thread.name == "staticllm-policy"]


def test_a_policy_plans_again_when_the_missing_program_is_installed():
    """The policy legally decodes four requests at once while the program for that is still being compiled."""

    class AllTogether:
        num_plans = 0

        def plan(self, view):
            self.num_plans += 1
            plan = make_policy("fcfs").plan(view)
            return replace(plan, decode=tuple(r.id for r in view.running)) if plan.decode and not plan.swap_in else plan

    policy = AllTogether()
    engine = fake_engine(policy, 4, is_staged=True)
    requests = [fake_request(range(i, i + 9), 12) for i in range(4)]
    expected = [fake_answer(request.tokens, 12) for request in requests]
    engine.steps.add(requests)
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(20):
            engine.steps.step()
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
        if len(calls) == 2:
            raise ZeroDivisionError("ours")
        return plan(self, view)

    monkeypatch.setattr(POLICIES["dynamic"], "plan", failing)
    engine = fake_engine(make_policy("dynamic"))
    request = fake_request([1, 2, 3], 9)
    with pytest.warns(RuntimeWarning, match="Dynamic is replaced by fcfs for one step: it raised ZeroDivisionError"):
        run_to_end(engine, [request])
    assert len(calls) > 2, "it is asked again"
    assert request.tokens == fake_answer([1, 2, 3], 9)


def test_an_illegal_plan_of_the_fallback_loses_only_one_step(monkeypatch):
    def illegal(self, view):
        return Plan(decode=(123,))

    for name in POLICIES:
        monkeypatch.setattr(POLICIES[name], "plan", illegal)
    engine = fake_engine(make_policy("dynamic"), 2)
    requests = [fake_request(range(20 * i, 20 * i + 18), 6) for i in range(5)]
    with pytest.warns(RuntimeWarning, match="for one step: rule 'known-requests'"):
        run_to_end(engine, requests)
    assert [request.tokens for request in requests] == [fake_answer(range(20 * i, 20 * i + 18), 6) for i in range(5)]
    assert_empty(engine)


def test_a_request_that_no_program_can_run_ends_alone(monkeypatch):
    engine = fake_engine(make_policy("dynamic"))
    stuck, fine = fake_request(range(10), 4), fake_request(range(50, 60), 4)
    engine.steps.add([stuck, fine])
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
    end = outputs_of(stuck)[-1]
    assert isinstance(end.error, DeviceError)
    assert "no program or not enough slots for this request" in str(end.error)
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
    assert request.tokens == fake_answer([1, 2, 3], 4)
    assert time.monotonic() - start < 2
    release.set()
    engine.close()


@pytest.mark.parametrize("scheduler", ["fifo", None, 5, POLICIES["fcfs"], object()])
def test_an_object_without_a_plan_method_is_refused(scheduler):
    with pytest.raises(ConfigError, match="must be one of dynamic, chunked, decode_first, fcfs, prefill_first"):
        make_policy(scheduler)


def test_shipped_policies_need_no_thread():
    before = threading.active_count()
    planner = Planner(make_policy("dynamic"))
    assert threading.active_count() == before
    planner.close()

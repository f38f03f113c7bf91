"""Tests when the device waits for a client that is about to send tokens: only if sharing saves more than the wait costs."""

import threading
import time
import warnings
from dataclasses import replace

import pytest

from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.pipelines.engine.client_sequences.sequence import ClientSequence, Feed
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.scheduling.interface import Device, IdleView, JobView, Plan, RequestView, View
from staticllm.pipelines.scheduling.planner import MAX_WAIT_SHARE, POLICIES, BatchWait, Planner, make_policy
from staticllm.pipelines.scheduling.plans import MAX_WAIT_SECONDS, IllegalPlanError, check
from staticllm.pipelines.simulator.cluster import Scenario, configured_model
from staticllm.pipelines.simulator.cost_model import AnalyticCosts, HostCost
from staticllm.pipelines.simulator.workload import Arrival
from staticllm.testing import fake_engine, fake_request, run_to_end
from staticllm.testing.device import FakeProgram

STEP, ROW, NOW = 0.02, 0.001, 100.0
"""A decode step takes ``STEP`` and ``ROW`` for each of its requests."""
VARIANTS = tuple(Variant(rows, 64, rows) for rows in (1, 2, 3, 4))
CAP = MAX_WAIT_SHARE * (STEP + ROW)


def request(id, status="running"):
    return RequestView(id, status, 0.0, 12, 11, 11, 3, NOW)


def view_of(*ready_in, num_running=1, max_num_seqs=4, step=STEP, now=NOW, **changes):
    device = Device(VariantIndex(VARIANTS), lambda variant: step + ROW * variant.rows, high_slot=20)
    running = tuple(request(index) for index in range(num_running))
    away = tuple(
        IdleView(10 + i, NOW - 1, None if seconds is None else NOW + seconds) for i, seconds in enumerate(ready_in)
    )
    return replace(View(now, (), (), running, (), max_num_seqs, 40, 100, device, idle=away), **changes)


def test_the_device_waits_for_the_requests_with_which_it_saves_most():
    assert BatchWait().until(view_of(0.002)) == NOW + 0.002
    assert BatchWait().until(view_of(0.003, 0.001, None)) == NOW + 0.001, (
        "two more milliseconds, and nothing more saved"
    )
    assert BatchWait().until(view_of(0.002, num_running=3)) == NOW + 0.002


@pytest.mark.parametrize(
    "view",
    [
        view_of(),
        view_of(None),
        view_of(-0.001),
        view_of(CAP + 0.0001),
        view_of(0.002, num_running=0),
        view_of(0.002, max_num_seqs=1),
        view_of(0.002, step=0.0005),
        view_of(0.002, num_running=4, max_num_seqs=8),
        view_of(0.002, waiting=(request(5, "waiting"),)),
        view_of(0.002, prefilling=(request(5, "prefilling"),)),
        view_of(0.002, swapped=(request(5, "swapped"),)),
        view_of(0.002, jobs=(JobView(1, 0.01, 0.0),)),
    ],
)
def test_the_device_does_not_wait_for_nothing(view):
    assert BatchWait().until(view) is None


def test_the_waits_before_one_call_are_bounded_together():
    wait = BatchWait()
    assert wait.until(view_of(0.004)) == NOW + 0.004
    assert wait.until(view_of(0.0041, now=NOW + 0.004)) == NOW + 0.0041
    assert wait.until(view_of(0.0045, now=NOW + 0.0041)) is None
    assert wait.until(view_of(0.0045, now=NOW + 0.0042)) == NOW + 0.0045, "a wait before the next call"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_shipped_policy_waits_for_away_requests_unless_that_is_switched_off(name):
    assert Planner(make_policy(name)).plan(view_of(0.002)) == Plan(wait_until=NOW + 0.002)
    assert Planner(make_policy(name), waits_for_idle=False).plan(view_of(0.002)).decode == (0,)


@pytest.mark.parametrize(
    ("rule", "plan", "view"),
    [
        ("waits-alone", Plan(decode=(0,), wait_until=NOW + 1), view_of(0.002)),
        ("waits-for-idle", Plan(wait_until=NOW + 1), view_of()),
        ("waits-ahead", Plan(wait_until=NOW), view_of(0.002)),
        ("waits-ahead", Plan(wait_until=float("nan")), view_of(0.002)),
    ],
)
def test_a_wait_that_breaks_a_rule_is_refused(rule, plan, view):
    with pytest.raises(IllegalPlanError) as error:
        check(plan, view)
    assert error.value.rule == rule


class Waits:
    """A user's policy that never runs anything."""

    def plan(self, view):
        return Plan(wait_until=view.now + 0.6 * MAX_WAIT_SECONDS)


def test_a_users_policy_may_wait_but_not_for_ever():
    planner = Planner(Waits())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planner.plan(view_of(0.002)) == Plan(wait_until=NOW + 0.6)
    with pytest.warns(RuntimeWarning, match="rule 'waits-briefly': 1.2 s of waiting before one call, at most 1 s"):
        assert planner.plan(view_of(0.7, now=NOW + 0.6)).decode == (0,)
    planner.close()


def results_of(engine, *feeds):
    results = []
    engine.feed([Feed(sequence, tokens, results.append) for sequence, tokens in feeds])
    return results


@pytest.fixture
def clients(monkeypatch):
    """An engine, and two clients that usually think for 0.2 s, beside steps of 10 s; no call takes as long in fact."""
    run = FakeProgram.run
    monkeypatch.setattr(FakeProgram, "run", lambda self, meanwhile=None: 10.0 + 0 * run(self, meanwhile))
    engine = fake_engine(make_policy("dynamic"), starts_thread=False)
    sequences = [ClientSequence(engine) for _ in range(2)]
    results_of(engine, *((sequence, [1]) for sequence in sequences))
    engine.steps.step()
    for sequence in sequences:
        sequence._state.think.add(0.2)
    yield engine, sequences
    engine.close()


def test_a_wait_ends_when_the_other_client_sends_its_token(clients):
    engine, (first, second) = clients
    with engine.record() as trace:
        one = results_of(engine, (first, [2]))
        engine.steps.step()
        assert engine.core.wait_until is not None
        assert not one
        two = results_of(engine, (second, [3]))
        engine.steps.step()
        assert one
        assert two
    assert [len(step.decode) for step in trace.steps] == [2]


def test_a_wait_ends_when_a_request_arrives(clients):
    engine, (first, _) = clients
    one, request = results_of(engine, (first, [2])), fake_request([1, 2, 3], 2)
    engine.steps.step()
    assert not one
    run_to_end(engine, [request], max_steps=1_000_000)  # it waits for the second client, in steps without a call
    assert one


def simulated(waits_for_batch, think, num=2, policy="dynamic"):
    """Return the tokens per second of ``num`` clients that think."""
    config = StaticLLMConfig(max_prompt_len=64, min_response_len=100, max_num_seqs=4)
    model = configured_model(config, "shared", AnalyticCosts(20e-3, 0.5e-3, 5e-8), HostCost())
    arrivals = tuple(Arrival(index, 0.013 * index, 64, 60, think=think) for index in range(num))
    run = Scenario(replace(model, waits_for_batch=waits_for_batch), arrivals).run(policy)
    assert all(len(record.token_times) == 60 for record in run.requests)
    end = max(record.token_times[-1] for record in run.requests)
    return 60 * num / end


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("num", [2, 4])
def test_simulated_clients_are_faster_together_if_the_device_waits(policy, num):
    least = 1.1 if policy == "decode_first" else 1.35  # its prompts wait for idle rows
    assert simulated(True, 0.004, num, policy) >= least * simulated(False, 0.004, num, policy)


def test_a_single_client_and_one_that_thinks_long_lose_nothing():
    assert simulated(True, 0.002, 1) == simulated(False, 0.002, 1)
    assert simulated(True, 0.05) >= 0.99 * simulated(False, 0.05)


def test_simulated_clients_share_too_few_slots():
    config = StaticLLMConfig(max_prompt_len=64, min_response_len=100, max_num_seqs=4, kv_slots=200, host_kv_slots=0)
    model = configured_model(config, "shared", AnalyticCosts(20e-3, 0.5e-3, 5e-8), HostCost())
    run = Scenario(model, tuple(Arrival(index, 0.0, 64, 60, think=0.01) for index in range(4))).run("dynamic")
    assert all(len(record.token_times) == 60 for record in run.requests)


def test_clients_on_threads_share_calls(monkeypatch):
    """Each client waits for its logits and for 2 ms; without that wait, hardly any call has tokens of both."""
    run = FakeProgram.run

    def slow(program, meanwhile=None):
        start = time.perf_counter()
        run(program, meanwhile)
        time.sleep(0.12)
        return time.perf_counter() - start

    monkeypatch.setattr(FakeProgram, "run", slow)
    engine = fake_engine(make_policy("dynamic"))

    def serve(sequence):
        for token in range(16):
            done = threading.Event()
            engine.feed([Feed(sequence, [token], lambda result, done=done: done.set())])
            assert done.wait(30)
            time.sleep(0.002)

    with engine.record() as trace:
        threads = [threading.Thread(target=serve, args=(ClientSequence(engine),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    engine.close()
    assert len(trace.steps) <= 28

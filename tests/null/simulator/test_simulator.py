"""Tests the simulator: no token is lost, plans are legal, and queues behave as in queueing theory."""

import json
import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.errors import ConfigError, DeviceError
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.scheduling.planner import POLICIES
from staticllm.pipelines.scheduling.policies.fcfs import Fcfs
from staticllm.pipelines.scheduling.request_table import Limits
from staticllm.pipelines.simulator.cluster import Cluster, Link, Pool, Scenario, configured_model, tabled_model
from staticllm.pipelines.simulator.cost_model import AnalyticCosts, HostCost, read_costs, write_costs
from staticllm.pipelines.simulator.simulated_device import DeviceModel
from staticllm.pipelines.simulator.summary import jain, steady_rate, summarize, summarize_classes, summarize_run
from staticllm.pipelines.simulator.workload import Arrival, Lengths, burst, poisson, read_trace, uniform

COSTS = AnalyticCosts(weights=0.020, row=0.0005, attention=1e-8, fixed=0.001)


def model(num_seqs=3, kv_slots=96, host_kv_slots=64, longest=48, host=None, mode="shared", gap_ms=None):
    config = StaticLLMConfig(
        max_prompt_len=longest // 2, min_response_len=longest // 2, max_num_seqs=num_seqs, kv_slots=kv_slots,
        host_kv_slots=host_kv_slots, gap_ms=gap_ms,
    )  # fmt: skip
    return configured_model(config, mode, COSTS, host or HostCost())


requests = st.lists(
    st.tuples(st.floats(0, 1.5), st.integers(1, 24), st.integers(1, 24), st.integers(0, 2)), min_size=1, max_size=14
).map(lambda rows: [Arrival(number, *row) for number, row in enumerate(rows)])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["shared", "separate"])
@settings(max_examples=12, deadline=None)
@given(arrivals=requests, kv_slots=st.integers(48, 130), host_kv_slots=st.integers(0, 80), num_seqs=st.integers(1, 4),
       gap_ms=st.sampled_from([None, 1.0, 100.0]))  # fmt: skip
def test_every_request_gets_its_tokens_and_every_plan_is_legal(
    policy, mode, arrivals, kv_slots, host_kv_slots, num_seqs, gap_ms
):
    """KV slots are short, so that requests are swapped and preempted. A plan that breaks a rule would cause a warning."""
    scenario = Scenario(model(num_seqs, kv_slots, host_kv_slots, mode=mode, gap_ms=gap_ms), tuple(arrivals))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = scenario.run(policy)
    assert {r.id: len(r.token_times) for r in run.requests} == {a.id: a.num_output for a in arrivals}
    times = {a.id: a.time for a in arrivals}
    for record in run.requests:
        assert record.started >= times[record.id]
        assert list(record.token_times) == sorted(set(record.token_times))
    (steps,) = run.steps
    ends = [step.start + step.seconds for step in steps]
    assert all(end <= after.start + 1e-9 for end, after in zip(ends, steps[1:], strict=False)), "one call at a time"
    assert all(step.slots_in_use <= kv_slots for step in steps)


def test_a_device_without_requests_uses_no_slots():
    pool = Pool(model(kv_slots=64, host_kv_slots=30), POLICIES["prefill_first"], 2)
    Cluster(pool).run(poisson(20, 40, Lengths((1, 24), (1, 24))))
    for device in pool.devices:
        manager = device.core.device.kv_manager
        used = (manager.cache.slots.num_used, manager.host_pool.num_swapped_slots, device.num_requests)
        assert used == (0, 0, 0)


def single(seconds, output=1):
    """Return a device for one request at a time; its prompt and each token after the first take ``seconds``."""
    variants = [Variant(1, 0), Variant(1, 64), Variant(8, 0), Variant(8, 64)]
    return DeviceModel(VariantIndex(variants), lambda variant: seconds, Limits(1), 64, 64, 8 + output)


def test_waiting_times_follow_an_m_d_1_queue():
    """Each wait equals Lindley's recursion, and the mean is close to that of the M/D/1 queue in equilibrium."""
    load, service = 0.5, 0.01
    arrivals = poisson(load / service, 8_000, Lengths.fixed(8, 1), seed=1)
    run = Cluster(Pool(single(service), Fcfs, 1)).run(arrivals)
    waits = [request.started - request.arrival for request in run.requests]
    expected = [0.0]
    for before, after in pairwise(arrivals):
        expected.append(max(0.0, expected[-1] + service - (after.time - before.time)))
    assert waits == pytest.approx(expected, abs=1e-9)
    assert np.mean(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)


def test_a_lone_request_costs_its_calls_and_the_host():
    host = HostCost(step=0.001, row=0.0001, sequence=0.01)
    scenario = Scenario(model(host=host), (Arrival(0, 2.0, 20, 3),))
    (request,) = scenario.run("fcfs").requests
    first = 2.0 + host(20, 1) + COSTS(Variant(24, 0))
    step = host(1, 1) + COSTS(Variant(1, 48))
    assert request.token_times == pytest.approx((first, first + step, first + 2 * step))
    summary = summarize([request])
    assert summary.ttft_ms == pytest.approx((first - 2.0) * 1e3)
    assert summary.tpot_ms == summary.decode_tpot_ms == pytest.approx(step * 1e3)
    woken = replace(host, wake=0.5, answer=0.002)
    (request,) = Scenario(model(host=woken), (Arrival(0, 2.0, 20, 3),)).run("fcfs").requests
    first += 0.5 - host(20, 1) + 0.002
    assert request.token_times == pytest.approx((first, first + step, first + 2 * step)), "awake from then on"


@pytest.mark.parametrize("decode_devices", [1, 2, 8])
def test_disaggregation_is_as_fast_as_its_slower_side(decode_devices):
    """A prompt takes 0.01 s on one of two devices, and an answer of five tokens 0.04 s on one of the others."""
    cluster = Cluster(Pool(single(0.01, 5), Fcfs, 2), Pool(single(0.01, 5), Fcfs, decode_devices))
    run = cluster.run(burst(400, Lengths.fixed(8, 5)))
    assert steady_rate(run.requests) == pytest.approx(min(2 / 0.01, decode_devices / 0.04), rel=0.02)
    assert all(len(request.token_times) == 5 for request in run.requests)


def test_kv_slots_are_transferred_before_the_second_token():
    link = Link(latency=0.5, slot_bytes=1000, bandwidth=80_000)
    run = Cluster(Pool(single(0.01, 5), Fcfs, 1), Pool(single(0.01, 5), Fcfs, 1), link).run(
        burst(1, Lengths.fixed(8, 5))
    )
    (request,) = run.requests
    assert request.token_times[:2] == pytest.approx((0.01, 0.01 + 0.5 + 0.1 + 0.01))


def test_twice_the_devices_serve_a_burst_in_half_the_time():
    arrivals = tuple(burst(24, Lengths.fixed(20, 10)))
    spans = [summarize(Scenario(model(), arrivals, count).run("fcfs").requests).seconds for count in (1, 2)]
    assert spans[0] / spans[1] == pytest.approx(2, rel=0.01)


def test_two_choices_avoid_the_longest_of_three_queues():
    served = {}
    for dispatch in ("two_choices", "least_loaded"):
        pool = Pool(single(0.01, 5), Fcfs, 3, dispatch)
        run = Cluster(pool).run([Arrival(number, 0.0, 8, 5) for number in range(300)])
        served[dispatch] = [len(steps) // 5 for steps in run.steps]
        assert sum(served[dispatch]) == 300
    assert served["least_loaded"] == [100] * 3
    assert 0 < max(served["two_choices"]) - min(served["two_choices"]) <= 10


def test_concurrency_limits_the_admitted_requests():
    run = Scenario(model(num_seqs=3), tuple(burst(12, Lengths.fixed(10, 10))), concurrency=2).run("fcfs")
    events = sorted([(r.started, 1) for r in run.requests] + [(r.token_times[-1], -1) for r in run.requests])
    assert max(np.cumsum([change for _, change in events])) == 2


def test_a_request_that_can_never_fit_is_refused():
    with pytest.raises(ConfigError, match="a sequence can have 48 KV slots"):
        Scenario(model(), (Arrival(0, 0.0, 60, 1),)).run("fcfs")


@pytest.mark.filterwarnings("ignore:the scheduler")
def test_a_request_that_the_engine_cannot_run_is_an_error():
    small = replace(model(), kv_slots=32)
    with pytest.raises(DeviceError, match="request 3 of 40 tokens: no program or not enough KV slots"):
        Scenario(small, (Arrival(3, 0.0, 40, 2),)).run("fcfs")


def test_jains_index_is_1_for_equal_values_and_1_over_n_for_a_single_one():
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_workloads_have_the_requested_rate():
    lengths = Lengths((4, 9), (1, 3))
    stretched = poisson(5, 300, lengths, seed=1, is_span_fixed=True)
    assert stretched[-1].time == pytest.approx(60)
    assert poisson(5, 300, lengths, seed=1) == poisson(5, 300, lengths, seed=1) != poisson(5, 300, lengths, seed=2)
    assert {a.num_prompt for a in stretched} == set(range(4, 10))
    assert [a.time for a in uniform(4, 3, lengths)] == [0, 0.25, 0.5]


def test_a_trace_is_read_from_json_lines_and_csv(tmp_path):
    expected = [Arrival(1, 0.0, 5, 6), Arrival(0, 1.5, 7, 8, 2)]
    lines = tmp_path / "trace.jsonl"
    lines.write_text(
        '{"arrival": 4, "prompt": 7, "output": 8, "priority": 2}\n\n{"arrival": 2.5, "prompt": 5, "output": 6}\n'
    )
    table = tmp_path / "trace.csv"
    table.write_text("arrival,prompt,output,priority\n4,7,8,2\n2.5,5,6,\n")
    assert read_trace(lines) == read_trace(table) == expected


def test_a_trace_may_have_classes_and_their_figures_are_apart(tmp_path):
    lines = tmp_path / "trace.jsonl"
    chat = {"arrival": 0, "prompt": 12, "output": 10}
    agent = {"arrival": 0.05, "prompt": 20, "output": 20, "class": "proactive"}
    lines.write_text(
        "\n".join(map(json.dumps, [chat, agent, {**agent, "priority": -5}, {**chat, "class": "reactive"}]))
    )
    arrivals = read_trace(lines)
    assert sorted(arrival.priority for arrival in arrivals) == [-5, -1, 0, 0]
    run = Scenario(model(), tuple(arrivals)).run("dynamic")
    classes = summarize_classes(run)
    assert {name: (each.num_requests, each.num_tokens) for name, each in classes.items()} == {
        "reactive": (2, 20),
        "proactive": (2, 40),
    }
    assert classes["reactive"].ttft_ms < classes["proactive"].ttft_ms
    assert summarize_classes(Scenario(model(), tuple(arrivals[:1])).run("dynamic")) == {}


@pytest.mark.parametrize("extra", ['"class": "urgent"', '"class": "reactive", "priority": -1', '"class": [1]'])
def test_a_trace_with_a_wrong_class_is_refused_in_one_line(tmp_path, extra):
    lines = tmp_path / "trace.jsonl"
    lines.write_text('{"arrival": 4, "prompt": 7, "output": 8, ' + extra + "}")
    with pytest.raises(ConfigError, match=r"trace.jsonl:1: .*class") as caught:
        read_trace(lines)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", '{"arrival": 1}', "[1]", '{"arrival": 1, "prompt": 0, "output": 1}', ""])
def test_a_bad_trace_is_refused(tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace\.jsonl"):
        read_trace(path)


def test_costs_survive_a_round_trip_through_a_file(tmp_path):
    path = tmp_path / "costs.json"
    variants = (Variant(1, 64), Variant(4, 64, 4), Variant(16, 0), Variant(16, 64))
    write_costs(path, variants, COSTS)
    read, table = read_costs(path)
    assert set(read) == set(variants)
    assert [table(v) for v in variants] == pytest.approx([COSTS(v) for v in variants])
    config = StaticLLMConfig(max_prompt_len=16, min_response_len=16, max_num_seqs=4)
    scenario = Scenario(
        tabled_model(config, VariantIndex(read), table, HostCost()), tuple(burst(5, Lengths.fixed(9, 4)))
    )
    assert summarize(scenario.run("dynamic").requests).num_tokens == 20


@pytest.mark.parametrize(
    "entries",
    [[], {}, [1], [{"rows": 1}], [{"rows": 1, "kv_len": 0, "seconds": 1}], [{"rows": 1, "kv_len": 8, "seconds": 0}]],
)
def test_bad_costs_are_refused(tmp_path, entries):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=r"costs\.json"):
        read_costs(path)


@pytest.mark.parametrize("step", [5e-3, 20e-3, 40e-3, 200e-3])
@pytest.mark.parametrize("job", [5e-3, 20e-3, 35e-3, 1.0])
def test_jobs_of_any_length_get_their_share_beside_one_client_within_its_bound(step, job):
    config = StaticLLMConfig(max_prompt_len=64, min_response_len=100, max_num_seqs=1)
    arrivals = (Arrival(0, 0.0, 16, 100), Arrival(1, 300.0, 8, 1))
    costs = AnalyticCosts(step, 0.01 * step, 5e-8)
    run = Scenario(configured_model(config, "shared", costs, HostCost()), arrivals).with_jobs(job).run("dynamic")
    tokens = run.requests[0].token_times
    beside = sum(each.seconds for each in run.jobs[0] if tokens[0] <= each.start < tokens[-1])
    assert beside / (tokens[-1] - tokens[0]) >= 0.65
    assert summarize_run(run).longest_gap_ms <= max(4 * step * 1.02 * 1e3, 100)


def test_jobs_of_another_model_fill_the_device_and_requests_keep_their_bound():
    costs = AnalyticCosts(20e-3, 0.5e-3, 5e-8)
    config = StaticLLMConfig(max_prompt_len=64, min_response_len=100, max_num_seqs=2)
    arrivals = (Arrival(0, 0.0, 64, 100), Arrival(1, 60.0, 8, 1))
    alone = Scenario(configured_model(config, "shared", costs, HostCost()), arrivals)
    runs = {policy: alone.with_jobs(0.02).run(policy) for policy in POLICIES}
    for run in runs.values():
        calls = sorted([*run.steps[0], *run.jobs[0]], key=lambda call: call.start)
        assert all(first.end <= second.start + 1e-9 for first, second in pairwise(calls)), "one call at a time"
        summary = summarize_run(run)
        assert summary.num_tokens == 101
        assert summary.longest_gap_ms <= 100
        assert summary.job_share > 0.6
        assert summary.busy == pytest.approx(1, abs=0.01)
    assert summarize_run(alone.run("dynamic")).job_share == 0
    assert runs["dynamic"].requests[0].token_times[0] < 1.3 * alone.run("dynamic").requests[0].token_times[0]

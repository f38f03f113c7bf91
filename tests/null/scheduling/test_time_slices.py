"""Tests that places change hands in time slices: who gives, who gets, how often, and what it costs."""

from dataclasses import replace

import pytest

from staticllm.core import Variant
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.scheduling.interface import Device, RequestView, View
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.pipelines.scheduling.plans import check
from staticllm.pipelines.scheduling.request_table import Limits
from staticllm.pipelines.scheduling.time_slices import WAIT_SHARE, TimeSlices
from staticllm.pipelines.simulator.cluster import Scenario, max_rate
from staticllm.pipelines.simulator.cost_model import AnalyticCosts, HostCost
from staticllm.pipelines.simulator.simulated_device import DeviceModel
from staticllm.pipelines.simulator.summary import summarize
from staticllm.pipelines.simulator.workload import Lengths, poisson

COSTS = AnalyticCosts(weights=1e-3, row=1.5e-4, attention=5e-8)
SIZES = (
    *(Variant(seqs, kv_len, seqs) for seqs in (1, 2, 4) for kv_len in (512, 4096)),
    *(Variant(rows, kv_len, seqs) for rows in (16, 64, 256) for kv_len in (0, 512, 4096) for seqs in (1, 6)),
)
INDEX = VariantIndex(SIZES)
GAP_MS = 500.0


def device(swap_seconds=0.0):
    return Device(INDEX, COSTS, 512, swap_seconds=swap_seconds)


def a_view(now, **changes):
    """Return a view with two running requests, 1 and 2, and three swapped ones, of which 4 has waited longest."""
    running = tuple(RequestView(i, "running", 0.0, 101, 100, 100, 5, now) for i in (1, 2))
    swapped = tuple(
        RequestView(i, "swapped", 0.0, 101, 100, 0, 1, last, in_arena=False)
        for i, last in ((3, 9.8), (4, 9.5), (5, 9.9))
    )
    view = View(now, (), (), running, swapped, 2, 400, 4000, device(), gap_ms=GAP_MS)
    return replace(view, **changes)


def exchanges(view, moments):
    """Return the ids that are swapped out and in at each moment, if all views but their ``now`` are the same."""
    slices = TimeSlices()
    found = []
    for now in moments:
        gone, come = slices.exchange(replace(view, now=now))
        found.append(([request.id for request in gone], [request.id for request in come]))
    return found


def test_a_place_changes_hands_once_per_interval_and_the_longest_waiting_gets_it():
    interval = WAIT_SHARE * GAP_MS / 1e3 / 3
    slices = TimeSlices()
    slices.exchange(a_view(10.0, swapped=()))
    assert slices.exchange(a_view(10.0 + 0.9 * interval)) == ([], [])
    gone, come = slices.exchange(a_view(10.0 + 1.1 * interval))
    assert [r.id for r in gone] == [1]
    assert [r.id for r in come] == [4]
    assert slices.exchange(a_view(10.0 + 1.9 * interval)) == ([], [])
    gone, come = slices.exchange(a_view(10.0 + 4.0 * interval))
    assert len(gone) == len(come) == 2, "after a long call, several places change hands, but never more than there are"


def test_the_request_that_has_run_longest_gives_its_place():
    slices = TimeSlices()
    first, second = a_view(10.0).running
    slices.exchange(a_view(10.0, running=(second,), swapped=()))
    slices.exchange(a_view(10.1, running=(first, second), swapped=()))
    gone, _ = slices.exchange(a_view(10.1 + 0.11))
    assert [request.id for request in gone] == [2]


def test_a_place_is_never_given_to_a_lower_priority():
    view = a_view(10.0)
    view = replace(view, running=tuple(replace(request, priority=1) for request in view.running))
    assert exchanges(view, [10.0, 20.0]) == [([], []), ([], [])]
    one = replace(view.swapped[2], priority=1)
    assert exchanges(replace(view, swapped=(*view.swapped[:2], one)), [10.0, 20.0])[1] == ([1], [5])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ([1, 2], [4, 3])),
        ({"free_host_slots": 150}, ([1], [4])),
        ({"free_host_slots": 99}, ([], [])),
        ({"gap_ms": None}, ([], [])),
        ({"max_num_seqs": 3}, ([], [])),
        ({"max_num_seqs": 3, "free_slots": 3}, ([1, 2], [4, 3])),
        ({"device": device(swap_seconds=1e-2)}, ([1, 2], [4, 3])),
    ],
)
def test_nothing_moves_without_room_a_bound_or_need(changes, expected):
    assert exchanges(a_view(10.0, **changes), [10.0, 1000.0])[1] == expected


def test_slow_swaps_are_rare_and_hold_prompts_back():
    waiting = tuple(RequestView(i, "waiting", 0.0, 64) for i in range(10, 30))
    counts = [
        TimeSlices().num_startable(a_view(10.0, waiting=waiting, device=device(swap_seconds=seconds)))
        for seconds in (0.0, 1e-5, 1e-3)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0
    slow = exchanges(a_view(10.0, device=device(swap_seconds=1e-3)), [10.0, 11.0, 16.5, 16.8])
    assert [len(gone) for gone, _ in slow] == [0, 0, 0, 1], "0.2 s per exchange must take at most 3 % of the time"


@pytest.mark.parametrize("host_slots", [0, 99, 150, 4000])
@pytest.mark.parametrize("free_slots", [0, 1, 2, 99, 400])
def test_plans_with_exchanges_break_no_rule(host_slots, free_slots):
    policy = make_policy("dynamic")
    for now in (10.0, 10.2, 10.4, 11.0):
        view = a_view(now, free_slots=free_slots, free_host_slots=host_slots)
        plan = check(policy.plan(view), view)
        assert plan.decode


def test_the_longest_of_the_prompts_counts_not_only_the_first():
    short, long = RequestView(10, "waiting", 0.0, 16), RequestView(11, "waiting", 1.0, 256)
    slow = replace(a_view(10.0), gap_ms=120.0, swapped=a_view(10.0).swapped[:1])
    startable = [
        TimeSlices().num_startable(replace(slow, waiting=waiting)) for waiting in ((short,), (long,), (short, long))
    ]
    assert startable == [1, 0, 1], "the second one would not get a place in time"


def test_a_prompt_of_a_higher_priority_does_not_wait_for_swapped_requests_of_a_lower_one():
    urgent = RequestView(11, "waiting", 5.0, 16, priority=1)
    waiting = (*(RequestView(i, "waiting", 0.0, 16) for i in (12, 13)), urgent)
    crowded = a_view(10.0, waiting=waiting, device=device(swap_seconds=1e-5))
    assert TimeSlices().num_startable(replace(crowded, gap_ms=400.0, waiting=waiting[:2])) == 0
    assert TimeSlices().num_startable(replace(crowded, gap_ms=400.0)) == 1
    policy = make_policy("dynamic")
    plans = [policy.plan(replace(crowded, now=now, gap_ms=400.0)) for now in (10.0, 10.2, 10.4, 10.6, 10.8)]
    assert {request for plan in plans for request, _ in plan.prefill} == {urgent.id}


def test_prompts_leave_room_in_the_host_pool_for_running_requests():
    """Otherwise no running request could be swapped out, and those in the pool would wait until one ends."""
    waiting = tuple(RequestView(i, "waiting", 0.0, 10) for i in range(10, 30))
    counts = [
        TimeSlices().num_startable(a_view(10.0, waiting=waiting, free_host_slots=free)) for free in (99, 200, 350)
    ]
    assert counts == [0, 1, 2], "with the three swapped ones, the pool holds 3, 5 and 6 requests of 100 slots"


def served(gap_ms, policy="dynamic", prompt=64, output=64, swap=0.6e-6, slots=4096, host_slots=25600):
    length = prompt + output
    limits, host = Limits(4, gap_ms=gap_ms), HostCost(2e-4, swap=swap)
    roomy = DeviceModel(INDEX, COSTS, limits, 4096, 200 * length, length, host)
    rate = max_rate(Scenario(roomy, tuple(poisson(1.0, 100, Lengths.fixed(prompt, output)))))
    arrivals = poisson(2 * rate, 100, Lengths.fixed(prompt, output))
    scenario = Scenario(DeviceModel(INDEX, COSTS, limits, slots, host_slots, length, host), ())
    return summarize(replace(scenario, arrivals=tuple(arrivals)).run(policy).requests)


@pytest.mark.parametrize(("prompt", "output"), [(64, 64), pytest.param(64, 256, marks=pytest.mark.slow)])
def test_at_twice_the_load_no_answer_stops_for_long_and_throughput_stays(prompt, output):
    fcfs, bounded, free = (
        served(GAP_MS, "fcfs", prompt, output),
        served(GAP_MS, "dynamic", prompt, output),
        served(None, "dynamic", prompt, output),
    )
    assert bounded.gap_p95_ms <= 1.2 * GAP_MS
    assert free.gap_p95_ms > 3 * GAP_MS, "without the bound, an answer stops after its first token"
    assert bounded.tokens_per_second >= 0.97 * fcfs.tokens_per_second
    assert bounded.ttft_ms < fcfs.ttft_ms
    assert bounded.num_tokens == fcfs.num_tokens == 100 * output


def test_a_longer_gap_lets_more_prompts_begin_early():
    first, second = served(200.0), served(1000.0)
    assert second.ttft_ms < 0.7 * first.ttft_ms
    assert first.gap_p95_ms < second.gap_p95_ms


@pytest.mark.parametrize(("slots", "host_slots"), [(4096, 2048), (256, 25600)])
def test_no_answer_stops_for_long_if_slots_are_short(slots, host_slots):
    """16 longest sequences fit into the host pool, or two into the arena: a place is free then, but not its slots."""
    assert served(GAP_MS, slots=slots, host_slots=host_slots).gap_p95_ms <= 1.3 * GAP_MS

"""Tests that proactive requests never delay reactive ones beyond their bounds, and still get their share: on a virtual clock."""

import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticllm.config import StaticLLMConfig
from staticllm.pipelines.scheduling.device_share import BEHIND_SHARE
from staticllm.pipelines.scheduling.interface import OWN_BOUND
from staticllm.pipelines.scheduling.job_scheduler import BOUND_USED
from staticllm.pipelines.scheduling.planner import POLICIES
from staticllm.pipelines.simulator.cluster import Scenario, configured_model
from staticllm.pipelines.simulator.cost_model import AnalyticCosts, Blocks, HostCost
from staticllm.pipelines.simulator.simulated_clients import BulkJobs
from staticllm.pipelines.simulator.workload import Arrival

COSTS = AnalyticCosts(weights=0.010, row=0.0005, fixed=0.001)
BOUND = OWN_BOUND.seconds  # s; four steps take less
MODES = ["shared", "separate"]
TINY = 1e-9


def device(
    num_seqs=4, kv_slots=1024, host_kv_slots=256, longest=128, mode="shared", costs=COSTS, gap_ms=500.0, blocks=1
):
    config = StaticLLMConfig(
        max_prompt_len=longest // 2, min_response_len=longest // 2, max_num_seqs=num_seqs, kv_slots=kv_slots,
        host_kv_slots=host_kv_slots, gap_ms=gap_ms,
    )  # fmt: skip
    return replace(configured_model(config, mode, costs, HostCost()), blocks=Blocks(blocks))


def run(model, policy, *arrivals):
    """Return the records by the number of the arrival, and the calls. A plan that breaks a rule raises."""
    found = run_all(model, policy, *arrivals)
    return {record.id: record for record in found.requests}, found.steps[0]


def run_all(model, policy, *arrivals):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Scenario(model, tuple(sorted(arrivals, key=lambda each: each.time))).run(policy)


def documents(model, end):
    """Return the model with documents of which a call always waits until the moment ``end``."""
    return replace(model, jobs=BulkJobs(0.1, end))


def share_of(calls, end):
    return sum(min(call.start + call.seconds, end) - call.start for call in calls if call.start < end) / end


def chats(count, every=1.0, prompt=40, output=30):
    return [Arrival(number, number * every, prompt, output) for number in range(count)]


def agents(count, prompt=50, output=40, at=0.0):
    return [Arrival(1000 + number, at, prompt, output, priority=-1) for number in range(count)]


def ttfts(records):
    return [record.ttft for id, record in records.items() if id < 1000]


requests = st.lists(
    st.tuples(st.floats(0, 1.5), st.integers(1, 24), st.integers(1, 24), st.integers(-2, 1)), min_size=1, max_size=14
).map(lambda rows: [Arrival(number, *row) for number, row in enumerate(rows)])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=15, deadline=None)
@given(arrivals=requests, kv_slots=st.integers(48, 130), host_kv_slots=st.integers(0, 80), num_seqs=st.integers(1, 4),
       gap_ms=st.sampled_from([None, 1.0, 100.0]))  # fmt: skip
def test_both_classes_get_all_their_tokens_however_short_slots_are(
    policy, mode, arrivals, kv_slots, host_kv_slots, num_seqs, gap_ms
):
    model = device(num_seqs, kv_slots, host_kv_slots, 48, mode, gap_ms=gap_ms)
    records, steps = run(model, policy, *arrivals)
    assert {id: len(record.token_times) for id, record in records.items()} == {a.id: a.num_output for a in arrivals}
    assert all(step.slots_in_use <= kv_slots for step in steps)
    assert all(a.start + a.seconds <= b.start + TINY for a, b in pairwise(steps))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_agents", [1, 8, pytest.param(60, marks=pytest.mark.slow)])
def test_no_number_of_proactive_requests_moves_a_gap_beyond_the_bound(policy, mode, num_agents):
    """One chat decodes; its prompt comes first, so that every gap is one beside proactive work alone."""
    stream = Arrival(0, 0.0, 40, 60)
    records, steps = run(device(mode=mode), policy, stream, *agents(num_agents, at=0.3))
    times = records[0].token_times
    assert max(b - a for a, b in pairwise(times)) <= BOUND * BOUND_USED + TINY
    beside = [step for step in steps if step.start < times[-1] and any(id >= 1000 for id in ids_of(step))]
    assert len(beside) > 5, "the others run beside it"


def ids_of(step):
    return [*step.decode, *(id for id, _ in step.prefill)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_seqs", [1, 2, 4])
def test_one_call_of_proactive_requests_alone_runs_between_two_steps_of_a_stream(policy, mode, num_seqs):
    """Steps of a millisecond: dozens of them keep the bound. A second call runs where the share of device time is due."""
    fast = AnalyticCosts(weights=0.001, row=0.0002, fixed=0.0001)
    model = device(num_seqs, host_kv_slots=1024, mode=mode, costs=fast)
    records, steps = run(model, policy, Arrival(0, 0.0, 40, 60), *agents(6, at=0.01))
    assert len(records[0].token_times) == 60
    alone = 0
    for step in (step for step in steps if records[0].token_times[0] < step.start < records[0].token_times[-1]):
        alone = 0 if 0 in step.decode else alone + 1
        assert alone <= 2
    assert any(0 not in step.decode for step in steps if step.start < records[0].token_times[-1]), "some run alone"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_agents", [1, 8, pytest.param(60, marks=pytest.mark.slow)])
def test_no_number_of_proactive_requests_moves_a_first_token_beyond_its_bound(policy, mode, num_agents):
    """A prompt waits for the call that runs: a quarter of recent first tokens, or the smallest call with half of the best rate.

    The chats do not overlap, also beside proactive work: they would delay each other.
    """
    alone, _ = run(device(mode=mode), policy, *chats(6, every=4.0))
    model = device(mode=mode)
    records, _ = run(model, policy, *chats(6, every=4.0), *agents(num_agents, output=64, at=0.3))
    rates = {variant: variant.rows / COSTS(variant) for variant in model.index.variants if variant.sequences == 1}
    efficient = [variant for variant, rate in rates.items() if rate >= 0.5 * max(rates.values())]
    smallest = min(map(COSTS, efficient))
    assert smallest < 0.02 or mode == "separate", "which has one program for prompts"
    for id, record in records.items():
        if 0 < id < 1000:
            assert record.ttft <= alone[id].ttft * 1.3 + smallest + TINY


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_reactive_requests_take_the_places_and_slots_of_proactive_ones(policy, mode):
    model = device(num_seqs=2, kv_slots=260, host_kv_slots=0, mode=mode)
    alone, _ = run(model, policy, *chats(2, every=0.0, output=20))
    records, steps = run(model, policy, *agents(6), *(replace(chat, time=1.0) for chat in chats(2, output=20)))
    assert any(id >= 1000 for step in steps if step.start < 1.0 for id in step.decode)
    for id in (0, 1):
        assert records[id].ttft <= max(ttfts(alone)) + BOUND
        assert records[id].longest_gap <= max(BOUND, *(each.longest_gap for each in alone.values())) + TINY
    assert all(len(record.token_times) == 40 for id, record in records.items() if id >= 1000)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_proactive_requests_have_the_device_for_themselves_without_reactive_ones(policy, mode):
    as_chats, _ = run(device(mode=mode), policy, *(replace(each, priority=0) for each in agents(12)))
    as_agents, _ = run(device(mode=mode), policy, *agents(12))
    times = {id: record.token_times for id, record in as_agents.items()}
    assert times == {id: record.token_times for id, record in as_chats.items()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_a_device_full_of_reactive_prompts_leaves_proactive_work_its_floor(policy, mode):
    """Prompts of one token's answer arrive faster than they can run, so that one always waits for its first token."""
    flood = [Arrival(number, number * 0.01, 64, 1) for number in range(400)]
    records, steps = run(device(mode=mode), policy, *flood, *agents(4, output=20))
    end = max(record.token_times[-1] for id, record in records.items() if id < 1000)
    proactive = [step for step in steps if step.end <= end and all(id >= 1000 for id in ids_of(step))]
    busy = [step for step in steps if step.end <= max(each.end for each in proactive)]
    share = sum(step.seconds for step in proactive) / sum(step.seconds for step in busy)
    assert share == pytest.approx(BEHIND_SHARE, abs=0.03)
    assert all(records[1000 + number].token_times[-1] < end for number in range(4)), "they end beside the flood"


@pytest.mark.parametrize("policy", ["dynamic", "fcfs"])
def test_prompts_in_blocks_let_reactive_tokens_through(policy):
    """A proactive prompt that takes three times the bound runs in blocks, between which the chat decodes."""
    costs = AnalyticCosts(weights=0.010, row=0.004)
    model = device(mode="separate", costs=costs, blocks=24)
    stream = Arrival(0, 0.0, 4, 60)
    records, steps = run(model, policy, stream, *agents(3, prompt=60, output=4, at=0.3))
    times = records[0].token_times
    assert max(b - a for a, b in pairwise(times)) <= BOUND
    assert any(step.prefill and step.prefill[0][0] >= 1000 for step in steps if step.start < times[-1])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_agents", [1, 4, 40])
def test_documents_leave_proactive_requests_a_tenth(policy, mode, num_agents):
    found = run_all(documents(device(mode=mode), 20.0), policy, *agents(num_agents, output=64))
    ended = max(record.token_times[-1] for record in found.requests)
    end = min(ended, 20.0)
    assert share_of(found.steps[0], end) == pytest.approx(BEHIND_SHARE, abs=0.02)
    assert share_of(found.jobs[0], end) == pytest.approx(1 - BEHIND_SHARE, abs=0.02)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_beside_streams_and_documents_no_proactive_request_starves(policy, mode):
    """A minute: a reactive answer always decodes, and documents always wait. New agents need calls for their prompts, too."""
    end = 60.0
    streams = [Arrival(number, 4.0 * number, 20, 60) for number in range(15)]
    working = [replace(each, time=2.0 * number) for number, each in enumerate(agents(15, output=30))]
    found = run_all(documents(device(mode=mode), end), policy, *streams, *working)
    records = {record.id: record for record in found.requests}
    times = [record.token_times for id, record in records.items() if id >= 1000]
    assert all(len(tokens) == 30 for tokens in times)
    assert all(tokens[-1] - records[1000].arrival < end for tokens in times), (
        "none of them waits for the end of documents"
    )
    gaps = [max(b - a for a, b in pairwise(record.token_times)) for id, record in records.items() if id < 1000]
    assert max(gaps) <= BOUND * 1.5, "doubled at most, while a second prompt waits"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_documents_leave_room_for_proactive_rows_in_reactive_steps(policy, mode):
    stream = Arrival(0, 4.0, 20, 60)
    found = run_all(documents(device(mode=mode), 30.0), policy, stream, *agents(3, prompt=10, output=110))
    last = next(record for record in found.requests if record.id == 0).token_times[-1]
    steps = [step for step in found.steps[0] if 0 in step.decode and step.end <= last]
    assert sum(len(step.decode) == 4 for step in steps) > 0.9 * len(steps)
    assert share_of(found.jobs[0], last) > 0.6


@pytest.mark.parametrize("policy", POLICIES)
def test_on_a_desk_documents_have_most_of_what_reactive_work_leaves_and_agents_the_rest(policy):
    """A chat every 20 s and a completion every 5 s. ``left``: what neither reactive work nor documents take."""
    end = 40.0
    reactive = [*chats(2, every=20.0, prompt=60, output=60), *(Arrival(100 + n, 5.0 * n, 30, 16) for n in range(8))]
    working = agents(3, output=200)
    model = device(longest=300, kv_slots=2048)
    alone = run_all(model, policy, *working)
    rate_alone = sum(len(record.token_times) for record in alone.requests) / alone.steps[0][-1].end
    share_alone = share_of(run_all(model, policy, *reactive).steps[0], end)
    found = run_all(documents(model, end), policy, *reactive, *working)
    of_documents = share_of(found.jobs[0], end)
    rate = sum(moment < end for record in found.requests if record.id >= 1000 for moment in record.token_times) / end
    assert of_documents >= 0.7
    assert rate / rate_alone >= 0.6 * (1 - of_documents - share_alone)

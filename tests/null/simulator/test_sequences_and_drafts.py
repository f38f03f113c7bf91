"""Tests requests of several sequences, and drafts, in simulations: no token and no slot is lost, and rates are as given."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from staticllm.cli import cli
from staticllm.config import StaticLLMConfig
from staticllm.errors import ConfigError
from staticllm.pipelines.engine.speculation.draft_planner import FIRST_PLAIN
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.pipelines.simulator.cluster import Cluster, Pool, Scenario, configured_model, max_rate
from staticllm.pipelines.simulator.cost_model import AnalyticCosts, HostCost
from staticllm.pipelines.simulator.simulated_programs import Drafting
from staticllm.pipelines.simulator.summary import summarize_run
from staticllm.pipelines.simulator.workload import Arrival, Lengths, burst, read_trace

COSTS = AnalyticCosts(weights=0.020, row=0.0005, attention=1e-8, fixed=0.001)


def model(num_seqs=3, kv_slots=200, host_kv_slots=100, drafting=None):
    config = StaticLLMConfig(
        max_prompt_len=24, min_response_len=24, max_num_seqs=num_seqs, kv_slots=kv_slots, host_kv_slots=host_kv_slots
    )
    return replace(configured_model(config, "shared", COSTS, HostCost()), drafting=drafting)


def run_on_one(device_model, arrivals, policy="fcfs"):
    pool = Pool(device_model, lambda: make_policy(policy), 1)
    run = Cluster(pool).run(arrivals)
    return run, pool.devices[0]


requests = st.lists(
    st.tuples(
        st.floats(0, 1.0), st.integers(1, 20), st.integers(1, 20), st.integers(1, 5), st.booleans(), st.integers(0, 1)
    ),
    min_size=1, max_size=8,
).map(
    lambda rows: [
        Arrival(id, time, prompt, output, priority, num_answers=count, are_beams=beams)
        for id, (time, prompt, output, count, beams, priority) in enumerate(rows)
    ]
)  # fmt: skip


FULL_OF_SHARED_SLOTS = [
    *(Arrival(number, 0.0, 1, 1) for number in range(5)),
    Arrival(5, 0.0, 13, 2, num_answers=3),
    *(Arrival(number, 0.0, prompt, 2, num_answers=2, are_beams=True) for number, prompt in ((6, 16), (7, 19))),
]
"""After three prompts, two sequences of each share all 48 slots: none of the six alone frees one."""


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=25, deadline=None)
@given(
    arrivals=requests, kv_slots=st.integers(48, 160), host_kv_slots=st.sampled_from([0, 40]), num_seqs=st.integers(1, 4),
    drafting=st.sampled_from([None, Drafting(3, 0.7, 0.001)]), prefix_caching=st.booleans(),
)  # fmt: skip
@example(FULL_OF_SHARED_SLOTS, 48, 0, 1, None, False)
def test_every_sequence_gets_its_tokens_and_gives_its_slots_back(
    policy, arrivals, kv_slots, host_kv_slots, num_seqs, drafting, prefix_caching
):
    """Slots are so few that beams lose theirs while they wait for others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a plan that expects slots which siblings still share is replaced by fcfs
        device_model = replace(model(num_seqs, kv_slots, host_kv_slots, drafting), prefix_caching=prefix_caching)
        run, device = run_on_one(device_model, arrivals, policy)
    assert len(run.requests) == sum(arrival.num_answers for arrival in arrivals)
    wanted = sorted(arrival.num_output for arrival in arrivals for _ in range(arrival.num_answers))
    assert sorted(len(record.token_times) for record in run.requests) == wanted
    num_kept = device.core.device.kv_manager.prefix.idle_slots
    manager = device.core.device.kv_manager
    used = (manager.cache.slots.num_used, manager.host_pool.num_swapped_slots, device.num_requests)
    assert used == (num_kept, 0, 0)
    assert prefix_caching or not num_kept
    for step in run.steps[0]:
        assert 0 <= step.slots_in_use <= kv_slots


def test_the_prompt_of_several_answers_runs_once_and_its_slots_are_shared():
    arrival = Arrival(0, 0.0, 20, 5, num_answers=4)
    run, _ = run_on_one(model(num_seqs=4), [arrival])
    (steps,) = run.steps
    assert sum(count for step in steps for _, count in step.prefill) == 20
    assert max(step.slots_in_use for step in steps) == 20 + 4 * 4  # the last tokens need no slots
    assert [len(step.decode) for step in steps if step.decode] == [4] * 4
    assert {record.token_times for record in run.requests} == {run.requests[0].token_times}


def test_beams_go_on_together():
    arrival = Arrival(0, 0.0, 20, 6, num_answers=3, are_beams=True)
    wide, _ = run_on_one(model(num_seqs=3), [arrival])
    assert len({record.token_times for record in wide.requests}) == 1
    narrow, _ = run_on_one(model(num_seqs=1), [arrival])
    rounds = list(zip(*(record.token_times for record in narrow.requests), strict=True))
    for before, after in pairwise(rounds[1:]):
        assert max(before) < min(after)  # no beam is a token ahead
    assert narrow.requests[0].token_times[-1] > wide.requests[0].token_times[-1]


def test_beams_that_lost_their_slots_get_them_back_from_the_host_pool():
    """Eight beams have 160 slots, and 64 more places in the host pool: without them, prompts run again and again."""
    arrivals = [Arrival(number, 0.0, 20, 20, num_answers=4, are_beams=True) for number in range(2)]
    kept, again = (
        run_on_one(replace(model(4, 100, 200), prefix_caching=is_on), arrivals, "dynamic")[0] for is_on in (True, False)
    )
    rows = [sum(step.prefill_rows for step in run.steps[0]) for run in (kept, again)]
    assert rows[0] < rows[1]
    assert max(each.token_times[-1] for each in kept.requests) < max(each.token_times[-1] for each in again.requests)


def test_drafts_are_accepted_as_often_as_given_and_only_where_they_pay():
    arrivals = [Arrival(0, 0.0, 4, 24)]
    plain, _ = run_on_one(model(), arrivals)
    sure, _ = run_on_one(model(drafting=Drafting(3, 1.0)), arrivals)
    decoding = [step for step in sure.steps[0] if step.decode]
    assert [step.drafts[0][1:] if step.drafts else None for step in decoding] == [None] * FIRST_PLAIN + [(3, 3)] * 5
    assert sure.requests[0].token_times[-1] < plain.requests[0].token_times[-1] / 2
    never, _ = run_on_one(model(drafting=Drafting(3, 0.0)), arrivals)
    assert never.requests[0].token_times[-1] < 1.01 * plain.requests[0].token_times[-1], "the engine finds out, cheaply"
    slow, _ = run_on_one(model(drafting=Drafting(3, 0.5, seconds=1.0)), arrivals)
    assert slow.requests == plain.requests
    many = [Arrival(number, 0.0, 4, 24) for number in range(60)]
    run, _ = run_on_one(model(drafting=Drafting(1, 0.7)), many)
    summary = summarize_run(run)
    assert summary.num_drafted > 200
    assert summary.num_accepted / summary.num_drafted == pytest.approx(0.7, abs=0.1)


def test_impossible_drafts_and_sequences_are_one_line(tmp_path):
    for most, accept, seconds in ((0, 0.5, 0.0), (3, 1.5, 0.0), (3, 0.5, -1.0), (3, float("nan"), 0.0)):
        with pytest.raises(ConfigError, match="must be at least one token") as caught:
            Drafting(most, accept, seconds)
        assert "\n" not in str(caught.value)
    arrivals = (Arrival(0, 0.0, 4, 4, num_answers=2),)
    with pytest.raises(ConfigError, match="use devices that do both"):
        Scenario(model(), arrivals, 1, 1).run("fcfs")
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt,output,beams,answers\n0,4,5,3,\n1,4,5,,2\n2,4,5,,\n")
    found = [(arrival.num_answers, arrival.are_beams) for arrival in read_trace(trace)]
    assert found == [(3, True), (2, False), (1, False)]
    for line in ("0,4,5,0,1", "0,4,5,2,3", "0,4,5,1,999", "0,4,5,x,1"):
        trace.write_text(f"arrival,prompt,output,beams,answers\n{line}\n")
        if line == "0,4,5,0,1":  # as an empty cell
            continue
        with pytest.raises(ConfigError, match=r"trace.csv:2"):
            read_trace(trace)


def test_the_maximum_rate_counts_requests_and_not_answers():
    def rate(count):
        arrivals = tuple(replace(each, num_answers=count) for each in burst(6, Lengths.fixed(12, 12)))
        return max_rate(Scenario(model(num_seqs=4), arrivals))

    assert rate(4) < rate(1)


def test_the_command_line_has_them():
    def run(*options):
        small = [
            "simulate",
            "-n",
            "6",
            "--prompt",
            "20-40",
            "--output",
            "5-9",
            "--max-num-seqs",
            "4",
            "--policy",
            "fcfs",
        ]
        return CliRunner().invoke(cli, [*small, *options])

    figures = json.loads(run("--answers", "3", "--json").stdout)["fcfs"]
    assert figures["num_requests"] == 18
    assert "drafted tokens accepted" in run("--draft-tokens", "4", "--accept", "0.9").stdout
    assert json.loads(run("--beams", "2", "--json").stdout)["fcfs"]["num_requests"] == 12
    for wrong in (("--answers", "2", "--beams", "2"), ("--accept", "2"), ("--draft-tokens", "0"), ("--draft-ms", "nan"),
                  ("--answers", "2", "--disaggregate", "1x1")):  # fmt: skip
        result = run(*wrong)
        assert result.exit_code != 0, wrong
        assert "Traceback" not in result.output

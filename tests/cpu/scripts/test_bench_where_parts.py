"""How recorded requests, calls alone and counted nodes become the parts of the time of a prompt and of a decode step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench_where_nodes import NodeShare
from bench_where_parts import (
    CountedCall,
    Rounds,
    TokenRun,
    between,
    divide,
    fastest,
    parts_of,
    parts_tables,
)

from staticllm.core import Variant

PROMPT, STEP, WIDER = Variant(128, 0), Variant(1, 256), Variant(1, 512)
NODES = (
    NodeShare("matrix products", ("FullyConnected",), 10, 6.0, 0.75),
    NodeShare("attention", ("MatMul",), 2, 2.0, 0.25),
)
COUNTED = CountedCall(NODES, num_nodes=50, mean_ms=10.0)


def run_of(wall, calls, step=STEP):
    return TokenRun(wall, [0.9 * each for each in wall], calls, [(PROMPT,), *((step,) for _ in wall[1:])])


SLOW = run_of([0.4, 0.03, 0.03, 0.5], [0.3, 0.02, 0.02, 0.4])
FAST = run_of([0.1, 0.012, 0.011, 0.04], [0.09, 0.010, 0.010, 0.03])
ALONE = [[0.8 / 3, 0.016, 0.016, 0.3], [0.08, 0.011, 0.012, 0.3]]
WITH_COUNTERS = [[0.09, 0.011, 0.012, 0.02], [0.1, 0.011, 0.011, 0.3]]
ROUNDS = Rounds([SLOW, FAST], ALONE, WITH_COUNTERS)


def test_a_prompt_is_divided_by_its_fastest_round():
    parts = parts_of("ours", "prefill", 128, ROUNDS, COUNTED)
    assert parts.wall_ms == pytest.approx(100)
    assert parts.own_ms == pytest.approx(90)
    assert parts.host_ms == pytest.approx(10), "the wall time less the calls of the same request"
    assert parts.nodes_ms == pytest.approx(80 * 0.8), (
        "calls alone took 8/9 of those in both requests, and nodes have 8 of 10 ms"
    )
    assert parts.outside_ms == pytest.approx(80 * 0.2)
    assert [each.ms for each in parts.nodes] == pytest.approx([48, 16])
    assert parts.sum_ms == pytest.approx(90)
    assert parts.deviation == pytest.approx(-0.1)
    assert parts.slowdown == pytest.approx(90 / 80 - 1)
    assert parts.disturbance == pytest.approx(10 / 90 - 1)
    assert parts.cut_ms == pytest.approx(0.1)
    assert parts.programs == ("prefill[128x0]",)


def test_a_decode_step_is_the_median_one():
    parts = parts_of("ours", "decode", 128, ROUNDS, COUNTED)
    assert parts.wall_ms == pytest.approx(12)
    assert parts.own_calls_ms == pytest.approx(10)
    assert parts.host_ms == pytest.approx(2)
    assert parts.nodes_ms + parts.outside_ms == pytest.approx(10), (
        "calls alone took 0.8 and 1.2 of those in the requests"
    )
    assert parts.deviation == pytest.approx(0)
    assert parts.slowdown == pytest.approx(0.1), "the medians of the steps of the fastest rounds, 11 and 10 ms"
    assert parts.programs == ("generate[1x256]",)


def test_a_faster_call_with_counters_bounds_the_nodes():
    rounds = Rounds([FAST], [[0.08, 0.01]], [[0.06, 0.01]])
    parts = parts_of("ours", "prefill", 128, rounds, COUNTED)
    assert parts.nodes_ms == pytest.approx(48), "8 of 10 parts of 60 ms"
    assert parts.outside_ms == pytest.approx(32)


def test_a_disturbed_count_is_told():
    rounds = Rounds([FAST], [[0.08, 0.01]], [[0.006, 0.01]])
    (remark,) = [
        line for line in parts_tables([parts_of("ours", "prefill", 128, rounds, COUNTED)]) if line.startswith("ours:")
    ]
    assert "other work made calls with counters 67% longer" in remark


def test_calls_alone_count_only_where_the_same_programs_ran():
    wider = run_of([0.4, 0.03, 0.03, 0.5], [0.3, 0.02, 0.02, 0.4], WIDER)
    rounds = Rounds([wider, FAST], ALONE, WITH_COUNTERS)
    decode = parts_of("ours", "decode", 128, rounds, COUNTED)
    assert decode.nodes_ms + decode.outside_ms == pytest.approx(12), "the repeated calls of the fastest request only"
    prefill = parts_of("ours", "prefill", 128, rounds, COUNTED)
    assert prefill.nodes_ms + prefill.outside_ms == pytest.approx(80), "the prompts ran in the same program"


def test_the_programs_of_most_rounds_are_divided():
    once = run_of([0.4, 0.001, 0.001, 0.001], [0.3, 0.001, 0.001, 0.001], WIDER)
    assert fastest(Rounds([once, SLOW, FAST]), "decode") is FAST
    assert fastest(Rounds([once, FAST]), "decode") is once, "of as many rounds the fastest one"


class Scripted:
    """A pipeline whose requests take longer in each round."""

    def __init__(self, name):
        self.name = name
        self.events = []
        self.prompts = []

    def run(self, prompt, num_new, past_len):
        self.prompts.append(tuple(prompt[:8]))
        self.events.append(("run", len(prompt)))
        factor = len(self.events)
        return run_of([factor * each for each in FAST.wall[:num_new]], [factor * each for each in FAST.calls[:num_new]])

    def repeat(self, run):
        self.events.append("repeat")
        return run.calls

    def count(self, run):
        self.events.append("count")
        return run.calls

    def counted(self, run, phase):
        return COUNTED

    def forget(self):
        self.events.append("forget")


def test_pipelines_run_in_turns_and_the_first_round_warms_up():
    pipelines = [Scripted("ours"), Scripted("theirs")]
    parts = list(divide(pipelines, 128, 4, 2))
    assert [(each.pipeline, each.phase) for each in parts] == [
        ("ours", "prefill"), ("theirs", "prefill"), ("ours", "decode"), ("theirs", "decode"),
    ]  # fmt: skip
    assert pipelines[0].events == [("run", 128), "repeat", ("run", 128), "repeat", "repeat", ("run", 128)] + [
        "count", "count", "forget",
    ] * 2, "calls alone are not always the second"  # fmt: skip
    assert parts[0].wall_ms == pytest.approx(300), "the first round would have 100"
    assert [each.phase for each in divide(pipelines, 128, 1, 1)] == ["prefill", "prefill"]


def test_other_calls_than_those_of_the_request_before_are_run_again():
    class Changing(Scripted):
        def run(self, prompt, num_new, past_len):
            run = super().run(prompt, num_new, past_len)
            return run if len(self.prompts) < 3 else replace(run, programs=[(WIDER,) for _ in run.programs])

    pipeline = Changing("ours")
    (parts,) = divide([pipeline], 128, 1, 2)
    assert pipeline.events[:7] == [("run", 128), "repeat", ("run", 128), "repeat", "repeat", ("run", 128), "repeat"]
    assert parts.deviation == pytest.approx(0)


def test_a_turn_has_a_table_of_its_own():
    pipelines = [Scripted("ours"), Scripted("theirs")]
    turns = list(divide(pipelines, 30, 1, 2, past_len=900))
    assert [(each.phase, each.prompt_len, each.past_len) for each in turns] == [("turn", 30, 900)] * 2
    assert pipelines[0].events == [("run", 930), "repeat"] * 2 + ["repeat", ("run", 930)] + ["count", "count", "forget"]
    prompts = list(divide(pipelines, 30, 1, 1))
    heads = [line.split("|")[1].strip() for line in parts_tables([*turns, *prompts]) if "ours, ms" in line]
    assert heads == ["turn of 30 tokens after 900", "prompt of 30 tokens"]


def test_no_turn_begins_with_the_tokens_of_another_one():
    pipeline = Scripted("ours")
    for past_len in (0, 48, 96):
        list(divide([pipeline], 30, 1, 2, past_len=past_len))
    assert len(set(pipeline.prompts)) == 9, "the first turn of one would be cached by another"


def test_tables_show_the_parts_side_by_side():
    parts = [parts_of(name, "prefill", 128, ROUNDS, COUNTED) for name in ("ours", "theirs")]
    lines = parts_tables(parts)
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert table[0] == ["prompt of 128 tokens", "ours, ms", "share", "theirs, ms", "share"]
    rows = {row[0]: row[1:] for row in table[2:]}
    assert rows["nodes"] == ["64.000", "64.0%"] * 2
    assert rows["· matrix products"] == ["48.000", "48.0%"] * 2
    assert rows["host"] == ["10.000", "10.0%"] * 2
    assert rows["sum less wall time"] == ["", "-10.0%"] * 2
    assert any("more than 3% off" in line for line in lines)
    assert any("GenAI shows no program" in line for line in lines)
    assert not any("GenAI shows no program" in line for line in parts_tables(parts[:1]))


def test_kinds_beyond_the_largest_share_a_row():
    nodes = [NodeShare(f"kind {number}", ("A",), 1, float(9 - number), 0.1) for number in range(8)]
    lines = parts_tables([parts_of("ours", "prefill", 128, ROUNDS, CountedCall(nodes, 8, 80.0))])
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| ·")]
    assert rows == [*(f"· kind {number}" for number in range(6)), "· kind 6, kind 7"]


def test_times_between_moments():
    assert between(1.0, [3.0, 4.0, 4.5]) == [2.0, 1.0, 0.5]

"""Compares the simulation of WINDVE with the published tables, and policies with each other on the loads it leaves out."""

from itertools import groupby

import compare_windve
import pytest
import windve_loads as loads
import windve_tables as paper
from hypothesis import given
from hypothesis import strategies as st
from windve_simulation import (
    SimulatedDevice,
    burst_queries,
    lockstep_seconds,
    poisson_queries,
    simulate,
)

from staticllm.errors import ConfigError
from staticllm.pipelines.embedding.queue.loads import Line, ShapeCosts
from staticllm.pipelines.embedding.queue.policies import MOST_MARGIN, Predicted, Windve, WindveQueued


def test_the_intervals_of_alpha_are_those_of_the_published_depths():
    found = {device.name: device.alphas for device in paper.DEVICES}
    expected = {
        "V100": (0.01784, 0.01802),
        "Xeon": (0.0800, 0.0840),
        "Atlas": (0.00898, 0.00903),
        "Kunpeng": (0.0719, 0.0750),
    }
    for name, (low, high) in found.items():
        assert low < high
        assert (low, high) == (pytest.approx(expected[name][0], abs=3e-5), pytest.approx(expected[name][1], abs=1e-4))
    ratios = [main.line.alpha / helping.line.alpha for main, helping in paper.PAIRS]
    assert ratios == [pytest.approx(published, abs=0.01) for published in paper.ALPHA_RATIOS]


def test_all_regression_depths_of_table_3_are_exact():
    rows = paper.table_3()
    assert len(rows) == 8
    assert [row.regression for row in rows] == [row.published_regression for row in rows]
    exact = [(row.device, row.limit_s) for row in rows if row.stress == row.published_stress]
    assert exact == [("V100", 1.0), ("Atlas", 1.0)], "real devices are not lines"


def test_tables_1_and_2_follow_from_the_fine_tuned_depths():
    for row in paper.tables_1_and_2():
        published = row.published
        assert (row.alone, row.together) == (published.concurrency[0], sum(published.concurrency))
        is_misprint = published.gain == 22.3
        assert row.gain == pytest.approx(22.9 if is_misprint else published.gain, abs=0.1)
        if row.predicted is not None:
            assert row.predicted == pytest.approx(row.gain, abs=3.1), "the error of a prediction without fine-tuning"
    predicted = [row.predicted for row in paper.tables_1_and_2() if row.predicted is not None]
    assert predicted == [pytest.approx(gain, abs=0.05) for gain in (20.0, 20.8, 2.4, 7.7)]


def test_savings_are_the_published_ones_of_a_peak():
    assert [(row.model, round(row.saving, 1)) for row in paper.savings()] == [("bge", 18.6), ("jina", 21.1)]


def test_gains_that_the_paper_names_differ():
    """1.20, 1.22 and 22.3 % are all said to be the best; the errors say what the tables have."""
    gains = {
        (row.published.model, row.published.limit_s): row.gain
        for row in paper.tables_1_and_2()
        if row.published.main == "V100"
    }
    assert {key: round(gain, 1) for key, gain in gains.items()} == {
        ("bge", 1.0): 18.2, ("bge", 2.0): 22.9, ("jina", 1.0): 22.9, ("jina", 2.0): 26.8,
    }  # fmt: skip


def test_the_statements_about_figure_5():
    first, second = paper.long_texts()
    assert first.helping == 0
    assert (second.main, second.helping) == (10, 2)
    assert second.helping / second.main == 0.2


@given(limit_s=st.floats(1.0, 8.0), pair=st.sampled_from(paper.PAIRS))
def test_the_gain_of_two_devices_is_below_the_ratio_of_alphas(limit_s, pair):
    """Equation 19, for the lines of the paper; one query is what rounding down can add."""
    main, helping = (loads.depth(device.line, limit_s) for device in pair)
    assert helping / (main + 1) <= pair[0].line.alpha / pair[1].line.alpha


def test_a_batch_in_lockstep_takes_as_long_as_its_line():
    devices = [SimulatedDevice("a", Line(0.01, 0.1).new_load, 10), SimulatedDevice("b", Line(0.1, 0.1).new_load, 3)]
    assert lockstep_seconds(devices, 10) == pytest.approx(0.2)
    assert lockstep_seconds(devices, 13) == pytest.approx(0.4)


def test_a_query_that_arrives_while_a_batch_runs_waits_for_it():
    device = SimulatedDevice("a", Line(0.1, 0.5).new_load, 3)
    queries = poisson_queries(4.0, 400, seed=1)
    run = simulate([device], Windve(), queries, 1.0)
    assert 1.0 < run.worst_s <= 0.8 + 0.5 + 1e-9, "T - and not more than T + beta - with a full queue of T"
    assert simulate([device], WindveQueued(), queries, 1.0).worst_s == pytest.approx(1.6, abs=0.05), "2 T"


@given(seed=st.integers(0, 999), spread=st.sampled_from([0.0, 0.7]), bursts=st.booleans(), limit_s=st.floats(0.3, 2.0))
def test_predicted_is_never_late_and_accounts_for_every_query(seed, spread, bursts, limit_s):
    costs = ShapeCosts({(1, 128): 0.02, (4, 128): 0.06, (1, 512): 0.09})
    devices = [SimulatedDevice("a", costs.new_load), SimulatedDevice("b", Line(0.05, 0.1, 1.15).new_load)]
    queries = (burst_queries if bursts else poisson_queries)(150.0, 300, seed, spread)
    run = simulate(devices, Predicted(limit_s), queries, limit_s)
    assert run.late == 0
    assert run.worst_s <= MOST_MARGIN * limit_s + 1e-9
    assert run.num_admitted == round(run.num_queries * (1 - run.busy))


@pytest.fixture(scope="module")
def rows():
    found = list(loads.load_table(count=2000))
    assert len(found) == loads.NUM_ROWS
    return {
        key: {row.policy: row for row in group}
        for key, group in groupby(found, lambda r: (r.main, r.limit_s, r.arrivals))
    }


def test_the_order_of_policies_under_overload(rows):
    for (main, _, arrivals), by_policy in rows.items():
        together = {policy: row.together for policy, row in by_policy.items()}
        rates = {policy: run.in_time_rate for policy, run in together.items()}
        assert rates["windve_q"] < rates["windve"] < rates["predicted"]
        assert together["windve"].late > (0.05 if arrivals == "bursts" else 0.25), (
            "Algorithm 1 as printed misses the limit of many"
        )
        assert together["predicted"].late == 0
        alone = by_policy["predicted"].alone.in_time_rate
        assert rates["predicted"] >= (1.1 if main == "V100" else 1.0) * alone, "what the CPU adds survives the limits"
        if arrivals == "mixed lengths":
            assert together["windve T-beta"].late > 0.05, "counts of queries cannot know their lengths"
            assert rates["windve T-beta"] < rates["predicted"]
        else:
            assert together["windve T-beta"].late == 0


def test_the_published_devices_under_poisson_arrivals():
    """Holds to an independent simulation of 8000 requests with the same parameters."""
    found = {(row.main, row.limit_s, row.policy): row for row in loads.load_table(arrivals=("poisson",))}
    row = found["V100", 1.0, "windve"]
    assert row.rate == pytest.approx(48.0)
    assert (row.alone.late, row.alone.busy) == (pytest.approx(0.61, abs=0.03), pytest.approx(0.35, abs=0.03))
    assert row.together.in_time_rate == pytest.approx(14, abs=1)
    lowered = found["V100", 1.0, "windve T-beta"]
    assert (lowered.alone.late, lowered.together.late) == (0, 0)
    assert lowered.alone.in_time_rate == pytest.approx(25, abs=0.6)
    assert lowered.together.in_time_rate == pytest.approx(29, abs=0.6)
    assert found["V100", 2.0, "windve"].together.late == pytest.approx(0.29, abs=0.03)
    assert found["Atlas", 1.0, "windve"].alone.late == pytest.approx(0.56, abs=0.03)


def test_loads_have_the_rate_and_the_lengths_that_they_name():
    steady, bursts = poisson_queries(50.0, 8000, 0, 0.7), burst_queries(50.0, 8000, 0)
    for queries in (steady, bursts):
        assert len(queries) == 8000
        assert 8000 / queries[-1].arrival == pytest.approx(50)
    assert sum(query.num_tokens for query in steady) / 8000 == pytest.approx(75, rel=0.03)
    assert max(query.num_tokens for query in steady) > 300
    assert len({query.arrival for query in bursts}) == pytest.approx(8000 / 16, rel=0.15)
    with pytest.raises(ConfigError, match="rate=0: must be more than 0"):
        poisson_queries(0.0, 5, 0)


def test_the_script_prints_published_figures_and_errors(capsys):
    few = list(loads.load_table(count=50, arrivals=("poisson",)))
    compare_windve.show(few)
    lines = capsys.readouterr().out.splitlines()
    assert "2 s    Atlas          195 (195)     192 (176)  (172) 1.79 s" in lines
    assert "bge    2 s    V100 + Xeon            96       118    22.9     (22.3)           20.8" in lines
    assert "bge      18.6  (18.6, 22.3)" in lines
    assert any("22/96 = 22.9 %, not 22.3 %" in line for line in lines)
    assert len([line for line in lines if line.startswith("poisson ")]) == len(few) == 16

"""Tests the cost model of WINDVE, and `staticllm plan --embed`, which prints it."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from staticllm.cli import cli
from staticllm.errors import ConfigError
from staticllm.pipelines.embedding.queue.loads import Line
from staticllm.pipelines.embedding.windve.deployment_cost import average_cost, peak_cost, saving
from staticllm.pipelines.embedding.windve.queue_depth import Estimate, depth, sustained_rate, write_estimates


@given(load=st.integers(0, 10**6), main=st.integers(1, 1000), helping=st.integers(0, 1000))
def test_the_saving_is_that_of_the_machines(load, main, helping):
    cost = peak_cost(load, main, helping, price=2.0, num_devices=3)
    assert cost.alone.exact * (1 - cost.saving) == pytest.approx(cost.together.exact)
    assert cost.alone.whole == -(-load // main)
    assert cost.together.whole == -(-load // (main + helping))
    assert cost.alone.price == cost.alone.whole * 6.0
    assert cost.saving == saving(main, helping)


def test_a_higher_throughput_saves_as_much_as_a_higher_concurrency():
    assert average_cost(500, 48.0, 11.0).saving == pytest.approx(11 / 59)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((1, 0, 3), "embeds 0 queries at once"), ((-1, 2, 3), "load: -1"), ((1, 2, 3, float("inf")), "price: inf")],
)
def test_an_impossible_load_is_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        peak_cost(*arguments)


def run(*arguments):
    return CliRunner().invoke(cli, ["plan", *arguments])


def test_plan_embed_prints_machines_and_savings():
    result = run("--embed", "--depths", "96,22", "--limit-s", "2", "--peak", "2000", "--average", "500", "--price", "3")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "peak     main device alone        20.8 machines, 21 whole, 63.00 per hour",
        "peak     with the CPU             16.9 machines, 17 whole, 51.00 per hour",
        "peak     saving 18.6%",
        "average  main device alone        10.4 machines, 11 whole, 33.00 per hour",
        "average  with the CPU              8.5 machines, 9 whole, 27.00 per hour",
        "average  saving 18.6%",
    ]


def test_plan_embed_reads_measured_queue_depths(tmp_path):
    path = tmp_path / "depths.json"
    write_estimates(
        path, "", [Estimate("NPU", Line(0.01, 0.1), 1.0, 1.0, 80), Estimate("CPU", Line(0.04, 0.2), 1.0, 1.0)]
    )
    arguments = ["--embed", "--estimates", str(path), "--peak", "1000", "--average", "100", "--json"]
    found = json.loads(run(*arguments).stdout)
    assert found["peak"]["alone"]["exact"] == pytest.approx(1000 / 80)
    assert found["peak"]["together"]["exact"] == pytest.approx(1000 / 100)
    assert found["average"]["alone"]["exact"] == pytest.approx(100 / 80), "(0.5 - 0.1) / 0.01 queries in half a second"
    other = json.loads(run(*arguments, "--limit-s", "2").stdout)
    assert other["peak"]["alone"]["exact"] == pytest.approx(1000 / 190), "the fine-tuned depth was for another limit"


@pytest.mark.parametrize("limit", ["1", "2"])
def test_the_same_line_needs_the_same_machines_by_depths_and_by_estimates(tmp_path, limit):
    """The V100 and the Xeon of the paper: 100 queries per second needed 2.5 machines by the one, 3.9 by the other."""
    lines = {"GPU": Line(0.018, 0.27), "CPU": Line(0.082, 0.32)}
    path = tmp_path / "depths.json"
    write_estimates(path, "", [Estimate(name, line, 1.0, 1.0) for name, line in lines.items()])
    depths = ",".join(str(depth(line, float(limit))) for line in lines.values())
    load = ["--embed", "--peak", "1000", "--average", "100", "--limit-s", limit, "--json"]
    by_depths, by_lines = run(*load, "--depths", depths), run(*load, "--estimates", str(path))
    few, more = json.loads(by_depths.stdout), json.loads(by_lines.stdout)
    assert few == {name: more[name] for name in ("peak", "average")}
    rate = sustained_rate(lines["GPU"], float(limit))
    assert more["evenly"]["alone"]["exact"] == pytest.approx(100 / rate)
    assert more["evenly"]["alone"]["exact"] > more["average"]["alone"]["exact"], "a query may wait for a whole batch"
    assert "queries that arrive evenly need more machines: --estimates" in by_depths.stderr
    assert "evenly: queries that arrive evenly" in by_lines.stderr


def test_a_row_without_machines_does_not_hide_the_others(tmp_path):
    """A batch of one takes more than half of the limit, so that no query that arrives during it is in time."""
    path = tmp_path / "depths.json"
    write_estimates(path, "", [Estimate("NPU", Line(0.01, 0.6), 1.0, 1.0), Estimate("CPU", Line(0.04, 0.2), 1.0, 1.0)])
    load = ["--embed", "--peak", "1000", "--average", "100", "--estimates", str(path)]
    shown, as_json = run(*load), run(*load, "--json")
    assert (shown.exit_code, as_json.exit_code) == (0, 0)
    assert [line.split()[0] for line in shown.stdout.splitlines()] == 3 * ["peak"] + 3 * ["average"]
    found = json.loads(as_json.stdout)
    assert found.pop("evenly") is None
    assert {*found} == {"peak", "average"}
    said = (
        "evenly: the main device embeds 0 queries per second within the limit: raise the limit or use a faster device"
    )
    assert said in shown.stderr.splitlines()
    assert said in as_json.stderr.splitlines()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--embed", "--depths", "9,1"], 2, "give the load, --peak or --average"),
        (["--embed", "--peak", "3"], 2, "give either --depths or --estimates"),
        (["--embed", "--peak", "3", "--depths", "9"], 2, "--depths '9': must be two whole numbers, for example 96,22"),
        (["--embed", "--peak", "3", "--depths", "0,4"], 1, "the main device embeds 0 queries at once"),
        (["--embed", "--peak", "3", "--estimates", "nowhere"], 1, "nowhere: there is no such file"),
        (["--embed", "--peak", "nan", "--depths", "0,4"], 2, "is not a number"),
        (["--embed", "--peak", "3", "--depths", "9,4", "--measured"], 2, "--depths has no meaning with --measured"),
        (["--embed", "--peak", "3", "--depths", "9,4", "model"], 2, "MODEL has no meaning with --embed"),
        (["--peak", "3"], 2, "--peak is an option of --embed: add --embed"),
    ],
)
def test_a_mistake_of_plan_embed_is_one_line(arguments, code, said):
    result = run(*arguments)
    assert result.exit_code == code
    assert said in result.output.splitlines()[-1]

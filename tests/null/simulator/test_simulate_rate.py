"""Tests the rates of `staticllm simulate`: the default can be served, and a rate that is too high gets a warning."""

import json
import re
import sys

import pytest
from click.testing import CliRunner

from staticllm.cli import cli


def simulate(*arguments):
    return CliRunner().invoke(cli, ["simulate", "--policy", "fcfs", "--json", *arguments])


def simulate_60(*arguments):
    return simulate("-n", "60", *arguments)


@pytest.mark.slow
def test_the_default_rate_is_below_the_maximum_rate():
    done = simulate_60()
    figures = json.loads(done.stdout)["fcfs"]
    rate, served = re.match(r"([\d.]+) requests/s arrive, 60% of the maximum rate of ([\d.]+)\n", done.stderr).groups()
    assert float(rate) == pytest.approx(0.6 * float(served), rel=0.01)
    assert figures["ttft_ms"] < 1000, "there is no long queue"
    fourfold = simulate_60("--devices", "4").stderr.split()[0]
    assert float(fourfold) > 2 * float(rate)


@pytest.mark.slow
def test_slower_costs_make_a_lower_rate():
    rates = [float(simulate_60("--weights-ms", ms).stderr.split()[0]) for ms in ("20", "80")]
    assert rates[1] < rates[0] / 2


@pytest.mark.slow
def test_a_rate_above_the_maximum_gets_a_warning():
    done = simulate_60("--rate", "4")
    assert done.stderr.startswith("Warning: ")
    assert "the queue grows" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not simulate_60("--rate", "0.1").stderr, "below the maximum rate"
    assert not simulate_60("--arrivals", "burst").stderr, "a burst exceeds every rate on purpose"


def test_a_trace_above_the_maximum_rate_gets_a_warning(tmp_path):
    path = tmp_path / "requests.csv"
    path.write_text("arrival,prompt,output\n" + "\n".join(f"{n / 20},256,64" for n in range(40)), encoding="utf-8")
    assert "the queue grows" in simulate("--trace", str(path)).stderr


def test_an_impossible_plot_is_refused_before_the_runs(tmp_path, monkeypatch):
    done = simulate_60("--plot", str(tmp_path / "no" / "plot.png"))
    assert done.exit_code == 1
    assert not done.stdout
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = simulate_60("--plot", str(tmp_path / "plot.png"))
    assert done.exit_code == 1
    assert not done.stdout
    assert "pip install matplotlib" in done.stderr

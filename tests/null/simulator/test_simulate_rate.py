"""`staticllm simulate`: the rate is one that the devices can serve, or it is said that they cannot."""

import json
import re
import sys

import pytest
from click.testing import CliRunner

from staticllm.cli import cli


def simulate(*arguments):
    return CliRunner().invoke(cli, ["simulate", "-n", "60", "--policy", "fcfs", "--json", *arguments])


def test_the_default_rate_leaves_the_devices_room():
    done = simulate()
    figures = json.loads(done.stdout)["fcfs"]
    rate, served = re.match(
        r"([\d.]+) requests/s arrive, 60% of the ([\d.]+) that can be served\n", done.stderr
    ).groups()
    assert float(rate) == pytest.approx(0.6 * float(served), rel=0.01)
    assert figures["ttft_ms"] < 1000, "nobody waits for a queue"
    fourfold = simulate("--devices", "4").stderr.split()[0]
    assert float(fourfold) > 2 * float(rate)


@pytest.mark.slow
def test_slower_costs_make_a_lower_rate():
    rates = [float(simulate("--weights-ms", ms).stderr.split()[0]) for ms in ("20", "80")]
    assert rates[1] < rates[0] / 2


@pytest.mark.slow
def test_too_many_requests_are_told():
    done = simulate("--rate", "4")
    assert (
        done.stderr.startswith("Warning: ") and "the queue grows" in done.stderr and len(done.stderr.splitlines()) == 1
    )
    assert not simulate("--rate", "0.1").stderr, "this much can be served"
    assert not simulate("--arrivals", "burst").stderr, "a burst is meant"


def test_a_trace_that_is_too_much_is_told(tmp_path):
    path = tmp_path / "requests.csv"
    path.write_text("arrival,prompt,output\n" + "\n".join(f"{n / 20},256,64" for n in range(40)), encoding="utf-8")
    assert "the queue grows" in simulate("--trace", str(path)).stderr


def test_a_plot_that_cannot_be_is_refused_before_the_runs(tmp_path, monkeypatch):
    done = simulate("--plot", str(tmp_path / "no" / "plot.png"))
    assert done.exit_code == 1 and not done.stdout
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = simulate("--plot", str(tmp_path / "plot.png"))
    assert done.exit_code == 1 and not done.stdout and "pip install matplotlib" in done.stderr

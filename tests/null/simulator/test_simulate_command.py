"""Tests `staticllm simulate`: tables and JSON on stdout, and one line per mistake."""

import json
import sys

import pytest
from click.testing import CliRunner

from staticllm.cli import cli

SMALL = ["simulate", "-n", "8", "--prompt", "20-40", "--output", "5-9", "--max-num-seqs", "2"]


def run(*arguments):
    return CliRunner().invoke(cli, [*SMALL, *arguments])


def test_a_table_has_a_line_for_each_policy():
    result = run("--policy", "fcfs", "--policy", "chunked", "--devices", "2")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["policy", "fcfs", "chunked"]


def test_json_output_has_the_figures_of_the_default_policies():
    figures = json.loads(run("--json", "--disaggregate", "2x1", "--transfer-ms", "5").stdout)
    assert list(figures) == ["dynamic", "fcfs"]
    for summary in figures.values():
        assert summary["num_requests"] == 8
        assert summary["second_token_ms"] > 5, "KV slots are transferred before the second token"
        assert 0 < summary["fairness"] <= 1
        assert 0 < summary["busy"] <= 1


def test_saved_costs_give_the_same_figures(tmp_path):
    costs = str(tmp_path / "costs.json")
    first = run("--json", "--save-costs", costs, "--policy", "fcfs")
    again = run("--json", "--costs", costs, "--policy", "fcfs")
    assert first.exit_code == again.exit_code == 0
    assert json.loads(first.stdout) == json.loads(again.stdout)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--rate", "0"], 2, "'--rate': 0"),
        (["--prompt", "9-3"], 2, "--prompt '9-3': must be a whole number from 1, or two"),
        (["--disaggregate", "3"], 2, "two whole numbers from 1: 6x2"),
        (["--disaggregate", "3x1", "--devices", "2"], 2, "with --disaggregate leave it out"),
        (["--weights-ms", "-1"], 2, "--weights-ms -1: must be 0 or more"),
        (["--max-num-seqs", "0"], 2, "'--max-num-seqs': 0"),
        (["--kv-slots", "3"], 1, "KV_SLOTS=3: one sequence can have"),
        (["--plot", "x.png", "--validate"], 2, "--plot draws simulated runs: leave out --validate"),
        (["--disaggregate", "1x1", "--host-kv-slots", "4"], 1, "HOST_KV_SLOTS is 4: raise it"),
    ],
)
def test_a_mistake_is_reported_in_one_line(arguments, code, said):
    result = run(*arguments)
    assert result.exit_code == code
    error = result.output.splitlines()[-1]
    assert error.startswith("Error: ")
    assert said in error


def test_a_trace_that_is_not_there_is_named():
    result = CliRunner().invoke(cli, ["simulate", "--trace", "nowhere.csv"])
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith("Error: ")
    assert "nowhere.csv" in result.output


def test_a_plot_without_matplotlib_names_the_package_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 1
    assert "pip install matplotlib" in result.output.splitlines()[-1]

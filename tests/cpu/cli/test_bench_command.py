"""Tests that the reports of ``staticllm bench`` and ``--profile`` match the measurements."""

from __future__ import annotations

import csv
import io
import json
import os

import pytest
from click.testing import CliRunner

from staticllm.cli import cli
from staticllm.pipelines.profiling.trace import Trace

pytestmark = pytest.mark.usefixtures("shared_programs")

SMALL = ["--max-prompt-len", "64", "--min-response-len", "64"]
REPORTS = {"--costs", "--divergence", "--calibration"}


@pytest.fixture
def bench(zoo):
    def bench(*arguments):
        runs = [] if REPORTS & {*arguments} else ["-r", "1"]
        result = CliRunner().invoke(cli, ["bench", "-m", str(zoo / "llama"), *SMALL, *runs, *arguments])
        assert result.exit_code == 0, result.output
        return result

    return bench


def test_every_bench_test_is_in_every_output_format(bench):
    which = ["--n-prompt", "16,40", "-n", "8", "-d", "0,30", "-c", "3"]
    names = ["pp16", "pp40", "tg8", "tg8 @ d30", "c3"]
    rows = json.loads(bench(*which, "--json").stdout)
    assert [row["test"] for row in rows] == names
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert row["ms"] > 0
        assert row["repetitions"] == 1
        assert row["programs"] == "paged"
    prompt = rows[0]
    assert prompt["tokens_per_second"] == pytest.approx(16 / (prompt["ms"] / 1e3)), "one prompt of 16 tokens"
    tokens = rows[2]
    assert tokens["tokens_per_second"] == pytest.approx(1e3 / tokens["ms"]), "ms a token"
    assert [row["test"] for row in csv.DictReader(io.StringIO(bench(*which, "-o", "csv").stdout))] == names
    table, chart, settings = bench(*which).stdout.split("\n\n")
    title, *bars = chart.strip().splitlines()
    assert len(table.splitlines()) == 2 + len(names)
    assert len({len(line) for line in table.splitlines()}) == 1
    assert title == "share of the fastest test of its kind:"
    assert [line.split("  ")[0].strip() for line in bars] == names[:4], "one test of c has nothing to be compared with"
    assert "█" in chart
    (of_all,) = settings.splitlines()
    assert of_all.startswith("settings for decode steps and prompts of 1 to 256 rows: ")


@pytest.mark.parametrize(
    "layout", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("separate", "shared")), "phases", "few_rows"]
)
def test_the_report_names_the_programs(layout, bench):
    (row,) = json.loads(bench("--n-prompt", "8", "-n", "0", "--programs", layout, "-o", "json").stdout)
    assert row["programs"] == layout


def test_a_profile_is_printed_and_written(tmp_path, bench):
    result = bench("--n-prompt", "16", "-n", "8", "--profile", str(tmp_path / "trace.json"))
    lines = result.stderr.splitlines()
    parts = {line.split()[0] for line in lines}
    assert {"device", "plan", "prepare", "commit", "sampling", "other", "together"} <= parts
    steps = Trace.load(tmp_path / "trace.json").steps
    assert sum(len(step.decode) for step in steps) == 2 * 8
    assert all(step.host.total > 0 for step in steps)
    device = next(line for line in lines if line.startswith("device")).split()
    prefill = [step.seconds for step in steps if step.prefill]
    assert float(device[1]) == pytest.approx(1e3 * sum(prefill) / len(prefill), abs=2e-3)


def test_run_prints_a_profile(tmp_path):
    arguments = ["run", "Hello!", "-n", "4", "--profile", str(tmp_path / "trace.json")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0
    assert "together" in result.stderr
    assert Trace.load(tmp_path / "trace.json").steps


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--n-prompt", "0", "-n", "0"], "nothing to measure"),
        (["--n-prompt", "x"], "whole numbers"),
        (["-p", "16"], "must be NAME=VALUE"),
        (["-n", "-3"], "negative"),
        (["--costs", "--divergence"], "--costs and --divergence print a report each"),
        (["--divergence", "--device", "NPU"], "NPU"),
        (["--costs", "-o", "csv"], "--costs prints a table or JSON"),
        (["--text", "README.md"], "--text is for --divergence"),
        (["--divergence", "--text", "/no/such/text"], "give a text in UTF-8 of at most 1 MiB"),
        (["--n-prompt", "16", "-n", "8", "--profile", "no/such/folder/trace.json"], "make it first"),
        (["-m", "/no/such/model", "--n-prompt", "100"], "--n-prompt: a prompt of 100 tokens, --max-prompt-len is 64"),
        (["-m", "/no/such/model", "--n-prompt", "0", "-n", "90", "-d", "60"], "--n-depth: 60 and 91 tokens"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, word):
    result = CliRunner().invoke(cli, ["bench", *SMALL, *arguments])
    assert result.exit_code in (1, 2)
    assert word in result.stderr
    assert "Traceback" not in result.output


def test_planned_costs_are_compared_with_timed_calls(bench):
    rows = json.loads(bench("--costs", "--json").stdout)
    assert {(row["rows"], row["kv_len"]) for row in rows} >= {(1, 512), (16, 0), (64, 0), (2, 512)}
    for row in rows:
        assert row["planned_ms"] > 0
        assert row["timed_ms"] > 0
        assert row["error"] == pytest.approx(row["planned_ms"] / row["timed_ms"] - 1)
    *table, _, summary = bench("--costs").stdout.splitlines()
    assert len(table) == 2 + len(rows)
    assert summary.startswith(f"errors of {len(rows)} costs: median ")


@pytest.mark.slow
def test_a_report_replaces_the_speeds(bench):
    (divergence, *_) = rows = json.loads(bench("--divergence", "--json").stdout)
    assert divergence["settings"] == "f32, no quantization"
    assert divergence["is_within"]
    table = bench("--divergence").stdout
    assert [line.split("|")[1].strip() for line in table.splitlines()[2 : 2 + len(rows)]] == [
        row["settings"] for row in rows
    ]
    assert f"over {rows[0]['tokens']} tokens" in table
    calibration = json.loads(bench("--calibration", "--json").stdout)
    assert [each["phases"] for each in calibration["chosen"]] == [["generate", "prefill"]]
    assert "no settings to choose from" in bench("--calibration").stdout


@pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="the plugin has no such products under a limited ISA")
def test_a_probe_is_printed_for_compressed_weights():
    result = CliRunner().invoke(cli, ["bench", "--calibration"])
    assert result.exit_code == 0, result.output
    settings, table, note = result.stdout.strip().split("\n\n")
    assert settings.startswith("settings for decode steps")
    assert [line.split()[1] for line in table.splitlines()[2:]] == ["1", "8", "32", "128"]
    assert "ms of one product" in note

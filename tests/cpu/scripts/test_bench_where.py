"""Tests what ``scripts/bench_where.py`` prints. Its programs with counters are compiled anew: they must not have run before."""

from __future__ import annotations

import json

import openvino_genai as genai
import pytest
from bench_where import command
from click.testing import CliRunner

SMALL = ["--max-prompt-len", "64", "--min-response-len", "64"]
WHERE = ["-r", "1", "--n-prompt", "24,40", "-d", "40", "-n", "4"]


def where(zoo, *arguments):
    result = CliRunner().invoke(command, ["-m", str(zoo / "llama"), *SMALL, *WHERE, *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_time_is_divided_beside_genais(zoo):
    found = json.loads(where(zoo, "--json").stdout)
    assert not found["without_genai"]
    assert [(each["pipeline"], each["phase"], each["prompt_len"]) for each in found["parts"]] == [
        (name, phase, count)
        for phase, count in (("prefill", 24), ("prefill", 40), ("decode", 40))
        for name in ("staticllm", "GenAI")
    ]
    for each in found["parts"]:
        assert each["nodes_ms"] == pytest.approx(sum(node["ms"] for node in each["nodes"]))
        assert each["sum_ms"] == pytest.approx(each["nodes_ms"] + each["outside_ms"] + each["host_ms"])
        assert each["deviation"] == pytest.approx(each["sum_ms"] / each["wall_ms"] - 1)
        assert min(each["nodes_ms"], each["outside_ms"], each["own_ms"]) > 0
        assert each["own_calls_ms"] < each["own_ms"]
        assert {"matrix products", "attention"} <= {node["kind"] for node in each["nodes"]}
    ours, theirs = found["parts"][-2:]
    assert ours["programs"] == ["generate[1x512]"]
    assert theirs["programs"] == [f"generate[1x{count}]" for count in range(40, 44)]


def test_a_turn_is_divided_beside_genais(zoo):
    turns = ["--n-prompt", "0", "-n", "0", "--n-turn", "6", "-d", "48"]
    found = json.loads(where(zoo, *turns, "--json").stdout)
    ours, theirs = found["parts"]
    assert [(each["phase"], each["prompt_len"], each["past_len"]) for each in (ours, theirs)] == [("turn", 6, 48)] * 2
    assert theirs["programs"] == ["prefill[7x48]"]
    (program,) = ours["programs"]
    assert program.startswith("prefill[") and int(program.partition("x")[0].partition("[")[2]) < 48, (
        "a prefix was cached"
    )
    for each in (ours, theirs):
        assert min(each["nodes_ms"], each["outside_ms"], each["own_ms"]) > 0
        assert each["sum_ms"] == pytest.approx(each["nodes_ms"] + each["outside_ms"] + each["host_ms"])


def test_time_is_divided_without_genai_if_it_cannot_load_the_model(zoo, monkeypatch):
    def refuse(*args, **properties):
        raise RuntimeError("somewhere.cpp:12:\nno such operation")

    monkeypatch.setattr(genai, "LLMPipeline", refuse)
    lines = where(zoo).stdout.splitlines()
    assert lines[-1] == "GenAI is not shown: no such operation"
    heads = [line.split("|")[1:-1] for line in lines if "staticllm, ms" in line]
    assert [[cell.strip() for cell in head] for head in heads] == [
        [what, "staticllm, ms", "share"]
        for what in ("prompt of 24 tokens", "prompt of 40 tokens", "decode step after 40 tokens")
    ]


@pytest.mark.slow
def test_nodes_are_divided_alone(zoo):
    nodes = ["-m", str(zoo / "llama"), *SMALL, "--nodes"]
    profiles = json.loads(CliRunner().invoke(command, [*nodes, "--json"]).stdout)
    assert [profile["variant"] for profile in profiles] == ["generate[1x512]", "prefill[64x0]"]
    assert "matrix products" in CliRunner().invoke(command, nodes).stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["-n", "8,16"], "give -n one"),
        (["--n-turn", "8", "-d", "0"], "give -d a number above 0"),
        (["--n-turn", "8", "-d", "60"], "--n-turn: a prompt of 69 tokens, --max-prompt-len"),
        (["--n-turn", "8", "-d", "16", "-n", "8"], "leave --n-prompt and -n out"),
        (["--n-turn", "8", "-d", "16", "--n-prompt", "16"], "leave --n-prompt and -n out"),
        (["-n", "0", "--n-prompt", "0"], "nothing to measure"),
        ([], "--n-prompt: a prompt of 128 tokens, --max-prompt-len is 64"),
        (["-d", "60", "-n", "80", "--n-prompt", "0"], "--n-depth: 60 and 81 tokens"),
        (["--nodes", "-d", "60"], "leave it out"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments, word):
    result = CliRunner().invoke(command, [*SMALL, *arguments])
    assert result.exit_code == 2
    assert word in result.stderr.splitlines()[-1]

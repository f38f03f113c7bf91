"""Tests what ``staticllm bench --where`` prints. Its programs with counters are compiled anew: they must not have run before."""

from __future__ import annotations

import json

import openvino_genai as genai
import pytest
from click.testing import CliRunner

from staticllm.cli import cli

WHERE = [
    "--max-prompt-len", "64", "--min-response-len", "64", "-r", "1",
    "--where", "--n-prompt", "24,40", "-d", "40", "-n", "4",
]  # fmt: skip


def where(zoo, *arguments):
    result = CliRunner().invoke(cli, ["bench", "-m", str(zoo / "llama"), *WHERE, *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_time_is_divided_beside_genais(zoo):
    found = json.loads(where(zoo, "-o", "json").stdout)
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
    assert ours["programs"] == ["generate[1x128]"]
    assert theirs["programs"] == [f"generate[1x{count}]" for count in range(40, 44)]


def test_a_turn_is_divided_beside_genais(zoo):
    turns = ["--n-prompt", "0", "-n", "0", "--n-turn", "6", "-d", "48"]
    found = json.loads(where(zoo, *turns, "-o", "json").stdout)
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

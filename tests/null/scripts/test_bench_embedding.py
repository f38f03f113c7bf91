"""Tests the texts, tables and comparisons of ``scripts/bench_embedding.py``, on figures made by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _scripts(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "scripts"))


@pytest.fixture
def figures():
    from bench_figures import Figures

    found = Figures()
    rows = {
        "clients_1": {"ours": [100, 60, 90], "genai": [50, 60, 30]},
        "ms_1": {"ours": [1, 2, 3, 100], "genai": [5, 5]},
        "mb": {"ours": [150]},
        "fill": {"ours": [0.96]}, "host": {"ours": [0.05]}, "gflops": {"ours": [45]}, "peak": {"ours": [90]},
        "gap_ms_alone": {"chat shared": [10, 10]}, "gap_ms_both": {"chat shared": [15, 25]},
    }  # fmt: skip
    for measure, peers in rows.items():
        for peer, values in peers.items():
            for value in values:
                found.add(measure, peer, value)
    return found


def test_ratios_are_medians_of_rounds(figures):
    from bench_embedding_report import ratios

    assert ratios(figures, ["ours", "genai"], [1, 4])[1] == ["genai", "2.00", ""]


def test_a_wrong_engine_is_marked_and_stays_in_the_table(figures):
    from bench_embedding_report import throughput

    _, ours, genai = throughput(figures, ["ours", "genai"], [1], {"ours": 1.0, "genai": 0.4})
    assert ours == ["ours", "90.0 (2 / 100)", "150", "1.000000"]
    assert genai == ["genai", "50.0 (5 / 5)", "", "0.400000 **wrong**"]


def test_the_least_cosine_counts():
    from bench_embedding_report import cosine

    assert cosine([[2, 0], [0, 1]], [[1, 0], [0, 1]]) == 1.0
    assert cosine([[2, 0], [1, 1]], [[1, 0], [0, 1]]) == pytest.approx(np.sqrt(0.5))
    assert cosine([[np.nan, 0]], [[1, 0]]) == cosine([[1, 0]], [[1, 0], [0, 1]]) == -1.0


def test_fill_products_and_chats_have_lines(figures):
    from bench_embedding_report import alone, chat

    assert alone(figures, ["ours", "genai"]) == [
        "ours, all texts in one call: fill 96.0%, host 5.0% of the time",
        "ours, call of the most rows of 128: 45 GFLOP/s, 50% of 90",
    ]
    assert chat(figures)[1:] == [["longest gap, ms", "shared", "10.0", "20.0", "2.00"]]


def test_texts_have_the_committed_lengths(root):
    from bench_embedding_texts import LENGTHS, texts

    lengths = json.loads(LENGTHS.read_text(encoding="utf-8"))
    assert [len(text.split()) for text in texts(len(lengths) + 3)] == [*lengths, *lengths[:3]]
    assert texts(5, seed=1) == texts(5, seed=1) != texts(5, seed=2)


def test_paragraphs_are_prose_only():
    from bench_embedding_texts import paragraphs

    parts = (
        "# Title of a page here",
        "One two three\nfour five.",
        "```\na b c d e\n\nf g h i j\n```",
        "| a | b | c |",
        "short",
    )
    page = "\n\n".join(parts)
    assert paragraphs(page) == ["One two three four five."]


def test_an_engine_without_its_package_is_left_out_with_a_line(monkeypatch, tmp_path):
    bench = pytest.importorskip("bench_embedding", exc_type=ImportError)
    monkeypatch.setattr(bench, "is_installed", lambda package: package != "optimum-intel")
    names, lines = bench.available(["ours", "st openvino", "fastembed"], str(tmp_path))
    assert names == ["ours"]
    assert lines == [
        "st openvino is left out: optimum-intel not installed",
        "fastembed is left out: this model has no ONNX file",
    ]


def test_a_section_replaces_its_own(figures, tmp_path):
    import bench_docs
    from bench_embedding_report import section
    from bench_machine import Machine

    machine = Machine("A processor", "avx2", 2, "2026-11-22", {"openvino": "2026.4.1"})
    result = {
        "machine": machine.as_dict(), "model": "minilm", "engines": ["ours", "genai"], "clients": [1], "rounds": 3,
        "command": "python x", "cosines": {"ours": 1.0}, "left_out": ["x is left out"],
        "figures": json.loads(json.dumps(figures.values)),
    }  # fmt: skip
    text = section(result)
    assert text.startswith("## AVX2 only: embeddings, minilm\n")
    assert "| genai | 2.00 |" in text and "- x is left out" in text
    page = f"{bench_docs.NEW}\n"
    once = bench_docs.replaced(page, "avx2 embeddings minilm", text)
    assert bench_docs.replaced(once, "avx2 embeddings minilm", text) == once


def test_slow_engines_run_fewer_batches_and_are_left_out_where_one_batch_takes_too_long(capsys):
    import argparse

    import bench_embedding

    class Fixed:
        def __init__(self, rate):
            self.rate = rate

        def do(self, job, count, batches, seed):
            return {"texts_per_second": self.rate}

    options = argparse.Namespace(clients=[1, 16, 256], quick=False)
    batches, lines = bench_embedding.warm_up({"fast": Fixed(1000.0), "slow": Fixed(4.0)}, options)
    assert batches == {("fast", 1): 24, ("fast", 16): 5, ("fast", 256): 1, ("slow", 1): 16, ("slow", 16): 1}
    assert lines == ["slow with 256 clients is left out: one batch takes over 12 s"]
    assert capsys.readouterr().out == lines[0] + "\n"


def test_targets_are_judged_where_they_were_measured(figures):
    from bench_embedding_report import targets

    more = {
        "clients_4": {"ours": [90.0], "genai": [30.0], "fast": [80.0], "ours list": [99.0]},
        "ttft_ms_both": {"chat shared": [30.0]}, "ttft_ms_alone": {"chat shared": [10.0]},
        "texts_both": {"chat shared": [8.0]}, "texts_alone": {"chat shared": [10.0]},
    }  # fmt: skip
    for measure, peers in more.items():
        for peer, values in peers.items():
            figures.add(measure, peer, *values)
    rows = targets(figures, ["ours", "ours list", "genai", "fast"], [4])[1:]
    found = [(row[1], row[3]) for row in rows]
    assert found == [("3.00", ""), ("1.12", "**missed**"), ("3.00", "**missed**"), ("0.80", "")]
    assert "best other (fast): 4 clients" in rows[1][0]

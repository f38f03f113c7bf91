"""Tests the figures, targets, tables and sections of ``scripts/bench.py``, on figures made by hand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

GRAMMARS = ("grammar_num_tokens", "grammar_first_mask_ms", "grammar_mask_us", "grammar_hidden")


@pytest.fixture(autouse=True)
def _scripts(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "scripts"))


@pytest.fixture
def figures():
    from bench_figures import Figures

    found = Figures()
    rows = {
        "ttft_16": {"ours": [50, 60, 40], "genai": [100, 60, 90], "genai f32": [70, 80, 75], "npuw": [800, 800, 800]},
        "clients_8": {"ours": [120, 130, 140], "batching": [100, 100, 100], "batching f32": [110, 90, 130]},
        "peak_mb": {"ours": [2000], "ours shared": [1500], "genai": [1000], "genai f32": [1300]},
        "tpot_128": {"ours": [26, 39, 26], "ours shared": [26, 39, 30]},
        "read_ms": {"ours": [20, 20, 20]},
        "host_ms": {"ours": [0.3]},
        **{measure: {"ours": [0.5]} for measure in GRAMMARS},
        "prefill_128": {"ours": [200, 220], "f32": [300, 330], "int8": [100, 100]},
        "prefill_16": {"f32": [30], "int8": [20]},
    }
    for measure, peers in rows.items():
        for peer, values in peers.items():
            for value in values:
                found.add(measure, peer, value)
    return found


def test_the_best_of_genai_has_the_best_median_of_each_row(figures):
    assert figures.best("ttft_16") == "genai f32"
    assert figures.of("ttft_16", "best genai") == [70, 80, 75]
    assert figures.best("clients_8") == "batching f32", "more is better"
    assert figures.best("peak_mb") == "genai"
    assert figures.best("read_ms") is None
    assert figures.of("read_ms", "best genai") == []


def test_a_ratio_is_the_median_of_the_ratios_of_rounds(figures):
    from bench_figures import Figure

    assert figures.ratio(Figure("ttft_16"), Figure("ttft_16", "genai")) == 0.5
    assert figures.ratio(Figure("tpot_128"), Figure("read_ms")) == 1.3
    assert figures.ratio(Figure("ttft_16"), Figure("ttft_128", "genai")) is None


def test_targets_are_judged_where_both_sides_ran(figures):
    from bench_targets import judge

    found = {
        (each.target.mine, each.target.other and each.target.other.peer): each for each in judge(figures, "qwen2-0.5b")
    }
    by_name = {(mine.peer, mine.measure, other): each for (mine, other), each in found.items()}
    first = by_name["ours", "ttft_16", "best genai"]
    assert (first.ratio, first.best, first.is_met, first.is_least) == (50 / 70, "genai f32", True, False)
    clients = by_name["ours", "clients_8", "best genai"]
    assert (clients.ratio, clients.best, clients.is_met, clients.is_least) == (120 / 110, "batching f32", False, True)
    shared = by_name["ours shared", "peak_mb", "best genai"]
    assert (shared.ratio, shared.is_met) == (1.5, False)
    assert by_name["ours shared", "tpot_128", "ours"].is_met
    assert by_name["ours", "tpot_128", "ours"].is_met, "reading the weights: 1.3"
    assert not by_name["ours", "host_ms", None].is_met
    assert by_name["ours", "ttft_16", "npuw"].is_met
    assert not any(mine.measure == "ttft_512" for mine, _ in found)


def test_tables_have_the_best_column_and_the_limits(figures):
    import bench_report as report
    from bench_targets import judge

    names = ["ours", "ours shared", "npuw", "genai", "genai f32", "batching", "batching f32"]
    lines = report.markdown(report.medians(figures, names)).splitlines()
    assert lines[0] == "| | " + " | ".join(names) + " | best genai |".replace("  ", " ")
    assert "| TTFT after 16 tokens, ms | 50.0 | | 800 | 90.0 | 75.0 | | | 75.0 (genai f32) |" in lines
    assert report.alone(figures, names) == [
        "reading the weights once, ms: ours 20.0",
        "host time per token, demo model, ms: ours 0.30",
        *(f"{report.name_of(measure)}: ours 0.50" for measure in GRAMMARS),
    ]
    ratios = report.markdown(report.ratios(judge(figures, "qwen2-0.5b"))).splitlines()
    assert "| best genai (genai f32): TTFT after 16 tokens, ms | 0.71 | at most 0.95 | |" in ratios
    assert "| best genai (batching f32): 8 clients, tokens/s | 1.09 | at least 1.10 | **missed** |" in ratios
    assert (
        "| ours shared / best genai (genai): peak of private memory, MB | 1.50 | at most 1.25 | **missed** |" in ratios
    )
    assert "| TPOT after 128 tokens, ms / reading the weights once, ms | 1.30 | at most 1.30 | |" in ratios
    assert report.markdown(report.prefill(figures)).splitlines()[2:] == [
        "| 16 | | 30.0 | 20.0 | |",
        "| 128 | 210 | 315 | 100 | 0.48 (int8) |",
    ]
    widths = {len(line) for line in report.text(report.prefill(figures)).splitlines()}
    assert len(widths) == 2, "columns are aligned, and only trailing spaces are cut"
    assert report.text([["only a header"]]) == report.markdown([]) == ""


@pytest.mark.parametrize(
    ("flags", "limit", "kind"),
    [
        ("avx2 avx512f avx512bw avx512_vnni avx512_bf16 amx_bf16 amx_int8", "", "amx"),
        ("avx2 avx512f avx512bw avx512_vnni avx512_bf16 amx_bf16 amx_int8", "AVX512_CORE_VNNI", "avx512-vnni"),
        ("avx2 avx512f avx512bw avx512_vnni avx512_bf16", "", "avx512-bf16"),
        ("avx2 avx512f avx512bw avx512_vnni", "AVX512_CORE_BF16", "avx512-vnni"),
        ("avx2 avx512f avx512bw", "", "avx512"),
        ("avx2 avx_vnni", "ALL", "avx2-vnni"),
        ("avx2", "", "avx2"),
        ("", "", "other"),
    ],
)
def test_the_kind_of_a_processor(flags, limit, kind):
    from bench_machine import kind_of

    assert kind_of(set(flags.split()), limit) == kind


def test_a_run_replaces_only_its_own_section(figures, tmp_path, root):
    import bench_docs
    from bench_machine import Machine

    machine = Machine("A processor", "avx2", 2, "2026-11-22", {"openvino": "2026.4.1"}, limit="AVX2")
    result = {
        "machine": machine.as_dict(), "model": "qwen2-0.5b", "peers": ["ours", "genai"], "rounds": 3, "command": "python x",
        "figures": json.loads(json.dumps(figures.values)), "same_tokens_f32": True,
    }  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{bench_docs.NEW}\n\nend\n", encoding="utf-8")
    for kind in ("amx", "avx2", "amx"):
        result["machine"]["kind"] = kind
        result["command"] += kind
        assert bench_docs.write_docs(result, page) == f"{kind} qwen2-0.5b"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Title\n\n<!-- bench: amx qwen2-0.5b -->\n## AMX: qwen2-0.5b\n")
    assert text.endswith(f"{bench_docs.NEW}\n\nend\n")
    assert "`python xamxavx2amx`, medians of 3 rounds. 2026-11-22, A processor with 2 cores, limited by" in text
    assert text.count("`python xamx`") == 0, "the first section of AMX was replaced"
    assert text.count("## AVX2 only: qwen2-0.5b") == text.count("`python xamxavx2`") == 1
    assert "the tokens of ours and genai are the same" in text
    with pytest.raises(ValueError, match="add it where"):
        bench_docs.replaced("# A page without a place", "amx qwen2-0.5b", "text")


def test_a_file_that_is_no_result_is_refused(tmp_path, root):
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    command = [sys.executable, root / "scripts" / "bench_docs.py", tmp_path / "other.json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "not a result of bench.py" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_page_has_a_place_for_new_sections(root):
    import bench_docs

    assert (root / "docs" / "lab" / "benchmarks.md").read_text(encoding="utf-8").count(bench_docs.NEW) == 1

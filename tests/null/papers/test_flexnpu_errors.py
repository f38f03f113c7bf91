"""Computes what FlexNPU's tables say against each other; the numbers are those of ``flexnpu_errors.ERRORS``."""

import compare_flexnpu
import pytest
from flexnpu_cluster import TABLE_3
from flexnpu_errors import ERRORS
from flexnpu_shares import DECODE_HEAVY, decode_tokens, table_2
from flexnpu_single import DYNAMIC, NUM_REQUESTS, RATE, STATIC


def test_table_4_ends_all_requests_before_its_throughput_can():
    first = DYNAMIC[0]
    assert NUM_REQUESTS / RATE + first.latency_seconds == pytest.approx(55.6, abs=0.05)
    assert first.run_seconds == pytest.approx(265.4, abs=0.05)
    assert [round(row.hidden_seconds, 1) for row in DYNAMIC] == [102.8, 483.5, 101.3, 488.2]


def test_the_static_column_of_table_4_does_not():
    """What is missing is at most the share of the run in which the last requests drain."""
    for row in STATIC:
        assert -0.04 * row.run_seconds < row.hidden_seconds < 0


def test_improvements_of_table_4_are_computed_from_it():
    gains = [100 * (new.throughput / old.throughput - 1) for old, new in zip(STATIC, DYNAMIC, strict=True)]
    assert [round(gain, 2) for gain in gains] == [3.57, -0.52, 3.36, 0.16]
    shorter = [100 * (new.ttft_ms / old.ttft_ms - 1) for old, new in zip(STATIC, DYNAMIC, strict=True)]
    assert [round(gain, 2) for gain in shorter] == [-99.70, -99.93, -92.75, -98.36]
    assert [row.ttft_ms > 8300 for row in DYNAMIC] == [False, False, True, True]
    assert round(STATIC[0].throughput / STATIC[0].output, 2) == 0.73, "requests per second"


def test_the_improvement_of_table_3_is_another():
    balanced, heavy = TABLE_3
    assert round(100 * (balanced.colocated / balanced.static - 1), 2) == 26.20
    assert round(100 * (619.18 / balanced.static - 1), 2) == 26.40
    assert round(100 * (heavy.colocated / heavy.static - 1), 2) == 5.15


def test_time_slice_redundancy_does_not_follow_from_the_rates():
    decode, prefill = table_2()
    assert (decode.published, round(decode.linear), round(decode.from_table_2)) == (75, 40, 40)
    assert (prefill.published, round(prefill.linear), round(prefill.from_table_2)) == (40, 70, 89)
    balanced = TABLE_3[0]
    assert round(384 / (96 + 0.25 * 288) * balanced.prefill) == 1120
    assert round(384 / (balanced.prefill_card_seconds + balanced.decode_card_seconds)) == 697


def test_decode_memory_does_not_follow_from_the_rates():
    balanced = decode_tokens(TABLE_3[0], TABLE_3[0].static)
    assert decode_tokens(DECODE_HEAVY, 53) / balanced == pytest.approx(0.866, abs=0.001)
    assert decode_tokens(DECODE_HEAVY, DECODE_HEAVY.static) / balanced == pytest.approx(2.395, abs=0.001)
    assert pytest.approx(1.70, abs=0.005) == (100 - 61) / (100 - 77)


def test_the_script_prints_errors(capsys):
    compare_flexnpu.show_errors()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ERRORS) + 2
    assert any("26.33 % (abstract, Table 3) is 26.20 %" in line for line in lines)

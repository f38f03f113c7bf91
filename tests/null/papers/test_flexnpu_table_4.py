"""Compares the simulation of FlexNPU's Table 4 with the published results.

The published dynamic column contradicts itself (``test_flexnpu_errors.py``) unless its TPOT leaves out the wait for the second
token. Read like that, TPOT is that of later tokens, and the second token must come as late as throughput and TTFT require.
"""

import pytest
from flexnpu_single import FITTED, table_4

TPOT_PERCENT = 6
SECOND_TOKEN_SHARE = 0.10


@pytest.mark.slow
@pytest.mark.parametrize("output", [256, 1024])
def test_throughput_ttft_and_tpot_are_within_their_bounds(output):
    cells = list(table_4((output,), seeds=(0,)))
    assert len(cells) == 4
    for cell in cells:
        throughput, ttft, tpot = cell.deviations
        assert abs(throughput) < 10, cell
        assert abs(ttft) < 10, cell
        assert abs(tpot) < TPOT_PERCENT, cell
        if cell.published is FITTED:
            assert abs(ttft) < 3, "PREFILL_SHARE is fitted on this cell"
        second = cell.second_token_ms / 1e3
        if cell.is_dynamic:
            assert second == pytest.approx(cell.published.hidden_seconds, rel=SECOND_TOKEN_SHARE), cell
        else:
            assert second < 1, "no request is swapped"

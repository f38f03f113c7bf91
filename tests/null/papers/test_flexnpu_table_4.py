"""Compares the simulation of FlexNPU's Table 4 with the published results."""

import pytest
from flexnpu_single import FITTED, table_4


@pytest.mark.slow
@pytest.mark.parametrize("output", [256, 1024])
def test_throughput_and_ttft_are_within_ten_percent(output):
    cells = list(table_4((output,), seeds=(0,)))
    assert len(cells) == 4
    for cell in cells:
        throughput, ttft, _ = cell.deviations
        assert abs(throughput) < 10, cell
        assert abs(ttft) < 10, cell
        if cell.published is FITTED:
            assert abs(ttft) < 3, "PREFILL_SHARE is fitted on this cell"

"""Compares the simulation of FlexNPU's Tables 2 and 3 with the published results."""

import pytest
from flexnpu_cluster import tables_2_and_3


def test_co_location_improves_on_disaggregation_as_published():
    interference, (fitted, predicted) = tables_2_and_3()
    assert 1 < interference < 1.2
    assert fitted.is_fitted
    assert not predicted.is_fitted
    assert fitted.improvement == pytest.approx(26.33, abs=3)
    assert predicted.improvement == pytest.approx(5.15, abs=3)
    for row in (fitted, predicted):
        assert row.static == pytest.approx(row.published.static, rel=0.005), "the slower side of the static split"
        assert row.colocated == pytest.approx(row.published.colocated, rel=0.03)

"""Tests the cost model: measured costs are followed, and the others are estimated from them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticllm.core import Variant
from staticllm.pipelines.costs.model import CostModel, nonnegative_least_squares

SIZES = [
    Variant(r, c, s) for r, s in ((1, 1), (4, 4), (16, 1), (64, 1), (64, 8), (256, 1)) for c in (0, 256, 1024, 4096)
]


def seconds(variant):
    return 2e-3 + variant.rows * 2e-5 + variant.rows * (variant.kv_len + variant.rows) * 4e-8 + variant.kv_len * 3e-7


def test_costs_that_were_never_measured_are_estimated():
    rng, table = np.random.default_rng(0), CostModel()
    for variant in (v for v in SIZES if v.kv_len in (0, 1024)):
        table.update(variant, seconds(variant) * rng.uniform(0.95, 1.05))
    for variant in SIZES:
        assert table(variant) == pytest.approx(seconds(variant), rel=0.2)


def test_a_few_measurements_scale_all_estimates():
    table = CostModel()
    table.update(Variant(1, 256), 0.03)
    assert table(Variant(1, 256)) == 0.03
    assert 0.03 < table(Variant(64, 0)) < 0.5
    assert table(Variant(256, 0)) > table(Variant(64, 0))


def test_no_estimate_is_negative():
    table = CostModel()
    for variant in SIZES[::2]:
        table.update(variant, 1e-3 if variant.rows > 16 else 5e-2)
    assert all(table(variant) > 0 for variant in SIZES)


def test_measurements_change_a_cost_gradually():
    table = CostModel({Variant(1, 256): 0.01})
    table.update(Variant(1, 256), 0.02)
    assert table(Variant(1, 256)) == pytest.approx(0.011)
    for _ in range(100):
        table.update(Variant(1, 256), 0.02)
    assert table(Variant(1, 256)) == pytest.approx(0.02, rel=1e-3)


def test_the_overrun_is_that_of_the_slowest_twentieth_of_recent_calls():
    variant, costs = Variant(1, 256), CostModel[Variant]()
    costs.set(variant, 0.01)
    for _ in range(19):
        costs.update(variant, costs(variant))
    assert costs.overrun == 1.0
    for ratio in (1.5, 1.0) * 40:
        costs.update(variant, ratio * costs(variant))
    assert costs.overrun == pytest.approx(1.5)
    for ratio in (0.5, 9.0) * 40:
        costs.update(variant, ratio * costs(variant))
    assert costs.overrun == 2.0
    for _ in range(70):
        costs.update(variant, 0.9 * costs(variant))
    assert costs.overrun == 1.0


def test_a_slow_first_inference_does_not_set_the_cost():
    table = CostModel({variant: seconds(variant) for variant in SIZES})
    new = Variant(128, 256)
    table.update(new, 10 * seconds(new))
    assert table(new) < 6 * seconds(new)


def test_a_slow_first_run_and_a_delayed_call_change_little():
    variant, costs = Variant(4, 256, 4), CostModel()
    costs.update(variant, 0.5)  # the first run at this size
    costs.update(variant, 0.01)
    assert costs(variant) == 0.01
    for _ in range(10):
        costs.update(variant, 0.01)
    costs.update(variant, 5.0)  # another program had the processor
    assert costs(variant) <= 0.012
    for _ in range(40):
        costs.update(variant, 0.1)  # the machine is throttled
    assert costs(variant) >= 0.09


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_nnls_finds_the_known_weights(seed, num_columns):
    random = np.random.default_rng(seed)
    columns, weights = random.random((40, num_columns)), random.random(num_columns)
    assert np.allclose(nonnegative_least_squares(columns, columns @ weights), weights, atol=1e-6)


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_no_weight_is_negative_and_the_fit_improves_on_zero(seed):
    random = np.random.default_rng(seed)
    columns, values = random.random((12, 4)), random.standard_normal(12)
    weights = nonnegative_least_squares(columns, values)
    assert weights.shape == (4,)
    assert (weights >= 0).all()
    assert np.linalg.norm(columns @ weights - values) <= np.linalg.norm(values) + 1e-9

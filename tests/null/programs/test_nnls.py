import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from staticllm.pipelines.costs.model import nonnegative_least_squares


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

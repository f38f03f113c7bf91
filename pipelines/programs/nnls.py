"""Solves least squares with weights that are not negative."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def nonnegative_least_squares(columns: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights ``[n]`` of ``columns [m, n]``, none negative, whose weighted sum is close to ``values [m]``.

    The column with the most negative contribution (weight times the column's mean size) is left out and the fit is repeated until
    no weight is negative. Unlike Lawson and Hanson's method this may miss the optimum; it needs at most n fits.
    """
    kept = list(range(columns.shape[1]))
    while True:
        weights, *_ = np.linalg.lstsq(columns[:, kept], values, rcond=None)
        if (weights >= 0).all() or len(kept) == 1:
            break
        del kept[int(np.argmin(weights * np.abs(columns[:, kept]).mean(axis=0)))]
    found = np.zeros(columns.shape[1])
    found[kept] = np.maximum(weights, 0)
    return found

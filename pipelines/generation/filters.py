"""Computes temperature, top_k, top_p, typical_p and XTC without ever sorting a whole vocabulary.

*Weights* are probabilities up to a common factor, float32 ``[vocab]``; a token with weight 0 cannot be drawn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
IntArray = NDArray[np.intp]
Mask = NDArray[np.bool_]

MIN_TEMPERATURE = 1e-6
"""A lower temperature is raised to this one, at which only the most likely token and its ties have a weight."""
BLOCK = 128
"""The number of tokens in a block; maxima and sums are computed per block first."""
BIN_SHIFT = 17
"""A weight's bin is its bit pattern without the last 17 bits, so a bin is at most 1/64 of its values wide."""
NUM_BINS = (0x3F800000 >> BIN_SHIFT) + 1
"""The number of bins from 0 up to the bin of 1.0, the largest weight."""
NUM_DISTANCE_BINS = (0x43800000 >> BIN_SHIFT) + 1
"""The number of bins from 0 up to the bin of 256.0; no distance between a surprise and the entropy is larger."""
TINY = np.float32(1e-37)
"""A lower probability counts as this one where its logarithm is needed."""
CHUNK = 1 << 15
"""The number of weights that are put into bins at a time; temporary arrays for all weights would map new pages in every call."""


def weights_of(logits: Logits, temperature: float) -> Logits:
    """Return the weights ``[n]`` of logits ``[n]``; the most likely token has weight 1."""
    weights: Logits = np.exp((logits - logits.max()) / np.float32(max(temperature, MIN_TEMPERATURE)))
    return weights


def largest(values: Logits, count: int) -> IntArray:
    """Return the indices ``[count]`` of the largest of ``values [n]``, ascending. Among equal values, the first are taken."""
    candidates = np.flatnonzero(values >= np.float32(_lower_bound(values, count)))
    found = values[candidates]
    border = np.partition(found, len(found) - count)[len(found) - count]
    above = np.flatnonzero(found > border)
    equal = np.flatnonzero(found == border)
    chosen: IntArray = np.sort(np.concatenate([above, equal[: count - len(above)]]))
    return candidates[chosen]


def nucleus(weights: Logits, share: float) -> Mask:
    """Return which of ``weights [n]`` top_p keeps, bool ``[n]``: the fewest largest ones that reach ``share`` of the sum.

    Among equal weights the first ones are kept. Only the bin at the boundary is sorted, because the leading bits of positive
    floats have the same order as the floats.
    """
    sums = _bin_sums(weights, weights, NUM_BINS)[::-1].cumsum()
    mass = share * float(sums[-1])
    place = min(int(np.searchsorted(sums, mass)), NUM_BINS - 1)
    border = NUM_BINS - 1 - place
    rest = mass - (float(sums[place - 1]) if place else 0.0)
    least, above = (np.array([border, border + 1], np.uint32) << BIN_SHIFT).view(np.float32)
    kept: Mask = weights >= above
    members = np.flatnonzero((weights >= least) & ~kept)
    order = np.argsort(-weights[members], kind="stable")
    count = int(np.searchsorted(np.cumsum(weights[members][order], dtype=np.float64), rest)) + 1
    kept[members[order[:count]]] = True
    return kept


def typical(weights: Logits, share: float) -> Mask:
    """Return which of ``weights [n]`` locally typical sampling keeps, bool ``[n]`` (arXiv 2202.00666, section 4.2).

    These are the fewest tokens that reach ``share`` of the sum, in the order in which their surprise, -log p, lies near to the
    entropy. Among equally near ones the first are kept. As in ``nucleus``, only the bin at the boundary is sorted.
    """
    probabilities = weights / np.float32(weights.sum(dtype=np.float64))
    distances: Logits = np.log(np.maximum(probabilities, TINY))
    distances += np.dot(probabilities, -distances)  # the entropy minus the surprise
    np.abs(distances, out=distances)
    sums = _bin_sums(distances, weights, NUM_DISTANCE_BINS).cumsum()
    mass = share * float(sums[-1])
    border = min(int(np.searchsorted(sums, mass)), NUM_DISTANCE_BINS - 1)
    nearest, farthest = (np.array([border, border + 1], np.uint32) << BIN_SHIFT).view(np.float32)
    kept: Mask = distances < nearest
    members = np.flatnonzero((distances < farthest) & ~kept)
    order = np.argsort(distances[members], kind="stable")
    rest = mass - (float(sums[border - 1]) if border else 0.0)
    count = int(np.searchsorted(np.cumsum(weights[members[order]], dtype=np.float64), rest)) + 1
    kept[members[order[:count]]] = True
    return kept


def without_top_choices(weights: Logits, threshold: float) -> Mask:
    """Return which of ``weights [n]`` XTC (exclude top choices) keeps, bool ``[n]``.

    Of the tokens with a probability of at least ``threshold`` it keeps only the least likely one; among equals the last. Tokens
    that another filter or a grammar has removed are not among them, also if ``threshold`` is 0.
    """
    top = np.flatnonzero((weights > 0) & (weights >= threshold * weights.sum(dtype=np.float64)))[::-1]
    kept: Mask = np.ones(len(weights), bool)
    if len(top) > 1:
        kept[top] = False
        kept[top[np.argmin(weights[top])]] = True
    return kept


def draw(weights: Logits, uniform: float) -> int:
    """Return the index that ``uniform``, a number in [0, 1], selects in proportion to ``weights [n]``.

    First the block is selected, then the index in the block. An index with weight 0 is never returned.
    """
    starts = np.arange(0, len(weights), BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    value = uniform * float(sums[-1])
    block = _place(sums, value)
    inside = np.cumsum(weights[starts[block] : starts[block] + BLOCK], dtype=np.float64)
    return int(starts[block]) + _place(inside, value - (float(sums[block - 1]) if block else 0.0))


def _lower_bound(values: Logits, count: int) -> float:
    """Return a value that at least ``count`` of ``values [n]`` reach, but not many more. It comes from the maxima of blocks."""
    maxima = values[: len(values) // BLOCK * BLOCK].reshape(-1, BLOCK).max(axis=1)
    searched = maxima if count <= len(maxima) else values
    return float(np.partition(searched, len(searched) - count)[len(searched) - count])


def _bin_sums(keys: Logits, weights: Logits, num_bins: int) -> NDArray[np.float64]:
    """Return the sum of the weights ``[n]`` in each bin of the ``keys [n]``, which are not negative, ``[num_bins]``."""
    sums = np.zeros(num_bins)
    for start in range(0, len(weights), CHUNK):
        bins = keys[start : start + CHUNK].view(np.uint32) >> BIN_SHIFT
        sums += np.bincount(bins.astype(np.intp), weights[start : start + CHUNK], num_bins)
    return sums


def _place(sums: NDArray[np.float64], value: float) -> int:
    """Return the first index whose cumulative sum ``sums [n]`` exceeds ``value``; if none does, the last with a weight."""
    return int(min(np.searchsorted(sums, value, side="right"), np.searchsorted(sums, sums[-1])))

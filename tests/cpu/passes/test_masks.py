"""Tests how a mask is classified from its values alone."""

import numpy as np
import pytest

from staticllm.compiler_passes.inputs.classify_mask import _linear, classify_one, probes_of, visible_cells
from staticllm.core import MaskKind

MAX_LEN = 256
PROBES = probes_of(MAX_LEN)


def kind_of(masks, evaluate=None):
    return classify_one(PROBES, masks, evaluate or (lambda probe: pytest.fail("nothing more to ask")), MAX_LEN)


def biased(slopes, window=None, hidden=-65504.0, shift=0.0, probes=PROBES):
    """Return the mask of a model with such a bias at each probe; ``shift`` is added to all keys of a row."""
    masks = []
    for probe in probes:
        seen = visible_cells(probe.past, probe.new, window)
        bias = _linear(probe, np.array(slopes)) + shift * np.arange(probe.new)[None, :, None]
        masks.append(np.where(seen, bias, hidden).astype(np.float32)[None])
    return masks


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_the_slopes_of_a_linear_bias_are_found(shift, window):
    slopes = [0.5, 0.25, 2.0**-8]
    found = kind_of(biased(slopes, window, shift=shift))
    assert found.kind.window == window
    assert found.slopes == pytest.approx(slopes)


@pytest.mark.parametrize("spoil", [lambda bias: -bias * bias, lambda bias: -np.sqrt(np.abs(bias))])
def test_a_nonlinear_bias_is_not_taken_for_a_linear_one(spoil):
    def evaluate(probe):
        (mask,) = biased([0.5, 0.25], probes=[probe])
        return np.where(mask < -1e4, mask, spoil(np.maximum(mask, -1e4)))

    assert kind_of([evaluate(probe) for probe in PROBES], evaluate) is None


def test_a_bias_per_key_becomes_a_table():
    """ALiBi in bf16 is rounded, and counted from the first key."""

    def evaluate(probe):
        key = np.arange(probe.past + probe.new, dtype=np.float32)
        bias = np.round(np.array([[0.3], [0.7]]) * key).astype(np.float32)[:, None]
        return np.where(visible_cells(probe.past, probe.new, None), bias, -65504.0)[None]

    found = kind_of([evaluate(probe) for probe in PROBES], evaluate)
    assert found.kind == MaskKind()
    assert not found.slopes
    assert found.table.values.shape[0] == 2
    assert found.table.values[1, 10] == np.float32(7)


def chunked(probe, size, hole=None):
    query = np.arange(probe.past, probe.past + probe.new)[:, None]
    key = np.arange(probe.past + probe.new)[None]
    seen = (key <= query) & (key // size == query // size)
    return np.where(seen & (key != hole), 0.0, -65504.0)[None, None].astype(np.float32)


def test_chunked_attention_becomes_a_table_of_first_positions():
    found = kind_of([chunked(probe, 9) for probe in PROBES], lambda probe: chunked(probe, 9))
    last = MAX_LEN - 1
    assert [found.kind.first(query) for query in (0, 8, 9, 17, 18, last)] == [0, 0, 9, 9, 18, last // 9 * 9]
    assert found.kind != kind_of([chunked(p, 10) for p in PROBES], lambda probe: chunked(probe, 10)).kind
    assert not found.kind.sees_all
    assert found.kind.port_name.startswith("mask.table:")


def test_a_mask_with_a_hole_is_refused():
    assert kind_of([chunked(p, 50, hole=2) for p in PROBES], lambda probe: chunked(probe, 50, hole=2)) is None

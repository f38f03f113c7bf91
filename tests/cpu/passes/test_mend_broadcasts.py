"""Tests targets of Broadcast that have 0 where the number of tokens belongs, as GenAI's reader of GGUF files writes them."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from staticllm.compiler_passes.graph.step_graph import StepGraph
from staticllm.compiler_passes.rewrites.mend_broadcasts import mend_broadcasts


def repeated(tokens, target):
    """Return a model that repeats each of two heads three times, for this number of tokens (-1: any)."""
    value = ops.parameter([1, 2, 1, tokens, 4], ov.Type.f32)
    shape = ops.concat([ops.constant(np.array([each])) for each in target], 0)
    return ov.Model([ops.broadcast(value, shape, broadcast_spec="BIDIRECTIONAL")], [value], "heads")


def computed(model, data):
    return ov.Core().compile_model(model, "CPU")([data])[0]


def test_a_number_of_tokens_is_that_of_the_input():
    data = np.random.default_rng(1).normal(size=(1, 2, 1, 5, 4)).astype(np.float32)
    model = repeated(-1, (1, 2, 3, 0, 4))
    with pytest.raises(RuntimeError):
        computed(model, data)
    mend_broadcasts(StepGraph(model))
    assert np.array_equal(computed(model, data), np.repeat(data, 3, 2))


@pytest.mark.parametrize("tokens,target", [(-1, (1, 2, 3, 1, 4)), (1, (1, 2, 3, 0, 4)), (0, (1, 2, 3, 0, 4))])
def test_other_targets_stay_as_they_are(tokens, target):
    model = repeated(tokens, target)
    before = len(model.get_ops())
    mend_broadcasts(StepGraph(model))
    assert len(model.get_ops()) == before

"""Cuts the head off a causal language model, so that its programs return embeddings in place of logits.

The rows that ``logit_rows [R]`` picks from the hidden states are the output ``embeddings [1, R, width]``. The embedding of a text
is that of its last token.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.errors import UnsupportedModelError
from staticllm.ports import EMBEDDINGS, LOGIT_ROWS

from ..graph.step_graph import StepGraph, named_result
from .select_logits import TOKEN_AXIS, find_head, logits_result

STAGE = "cut_head"
SMALLEST_NORM = 1e-12
"""Shorter vectors are divided by this instead of their length, as torch does."""


def cut_head(graph: StepGraph, is_normalised: bool) -> None:
    """Replace the output ``logits`` by the picked rows of what the head reads, of length 1 if ``is_normalised``.

    Raises:
        UnsupportedModelError: the model has no output ``logits``, or its head is not recognised.
    """
    result = logits_result(graph, STAGE)
    head = find_head(result)
    if head is None:
        raise UnsupportedModelError(
            STAGE, "no head was recognised: 'logits' is not the product of hidden states and a matrix"
        )
    rows = graph.add_parameter(LOGIT_ROWS, ov.PartialShape([-1]), ov.Type.i64)
    picked = ops.gather(head.input_value(0), rows, ops.constant(np.int64(TOKEN_AXIS))).output(0)
    if picked.get_element_type() != ov.Type.f32:
        picked = ops.convert(picked, "f32").output(0)
    graph.model.remove_result(result)
    graph.model.add_results([named_result(EMBEDDINGS, normalised(picked) if is_normalised else picked)])
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"cut before {head.get_friendly_name()!r}{', normalised' * is_normalised}")


def normalised(vectors: ov.Output) -> ov.Output:
    """Return vectors along the last axis divided by their length."""
    return ops.normalize_l2(vectors, np.array([-1]), SMALLEST_NORM**2, "max").output(0)

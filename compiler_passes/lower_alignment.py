"""Lowers a decoder to what its cross-attention looks at: a program for whole texts that returns weights instead of logits.

Some heads of an encoder-decoder model look at the frames from which the next token follows, so their weights say when each word
was spoken. A text is fed once more after it is known; logits, keys and values are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.core import AlignmentShape, KVType, Variant
from staticllm.errors import UnsupportedModelError
from staticllm.ports import ALIGNMENT, CROSS_MASK, HIDDEN, POSITION_IDS

from .decoder import DECODER_UNMERGED
from .graph.attention import find_attentions
from .graph.step_graph import StepGraph, named_result, redirect, upstream
from .lower_cross_window import LoweredForOneWindow
from .pass_pipeline import LoweringOptions
from .shapes.fix_shapes import fix_shapes

STAGE = "lower_alignment"
Heads = Sequence[tuple[int, int]]
"""Layer and head of each attention whose weights are wanted."""


def lower_alignment(
    decoder: ov.Model, heads: Heads, rows: int, cross_window_len: int, kv_type: KVType
) -> LoweredForOneWindow[AlignmentShape]:
    """Lower a decoder, which is changed, to the weights of ``heads`` for texts of up to ``rows`` tokens.

    The weights ``[1, heads, rows, cross_window_len]`` are the only output.

    Raises:
        UnsupportedModelError: a pass cannot lower the decoder, or it has not these layers and heads.
    """
    graph = StepGraph(decoder)
    options = LoweringOptions(rows, kv_type, cross_window_len=cross_window_len, num_cross_windows=1)
    reports = DECODER_UNMERGED.run(graph, options)
    model = fix_shapes(graph, Variant(rows, 0))
    _fix_inputs(model, rows)
    weights = ops.concat(_picked(model, heads), 1)
    parameters = [node for node in upstream([weights]) if node.get_type_name() == "Parameter"]
    result = named_result(ALIGNMENT, weights.output(0))
    found = ov.Model([result], parameters, "alignment")  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs
    found.validate_nodes_and_infer_types()
    shape = AlignmentShape(rows, len(heads), cross_window_len, tuple(graph.cross_states))
    return LoweredForOneWindow(found.clone(), shape, STAGE, reports)


def _fix_inputs(model: ov.Model, rows: int) -> None:
    """Replace positions and masks by constants: one text from its beginning, about one window."""
    known = {
        POSITION_IDS: np.arange(rows, dtype=np.int64)[None],
        CROSS_MASK: np.zeros((1, 1, rows, 1), np.float32),
        "mask.causal": np.triu(np.full((rows, rows), HIDDEN, np.float32), 1)[None, None],
    }
    for parameter in model.get_parameters():
        value = known.get(parameter.get_friendly_name())
        if value is not None:
            redirect(parameter.output(0), ops.constant(value).output(0))
            model.remove_parameter(parameter)
    model.validate_nodes_and_infer_types()


def _picked(model: ov.Model, heads: Heads) -> list[ov.Node]:
    """Return the weights ``[1, 1, rows, cross_window_len]`` of each head."""
    found = []
    attentions = [attention.node for attention in find_attentions(model) if attention.is_cross]
    for layer, head in heads:
        node = attentions[layer] if layer < len(attentions) else None
        count = 0 if node is None else int(node.get_output_shape(0)[1])
        if node is None or node.get_type_name() != "Softmax" or head >= count:
            raise UnsupportedModelError(
                STAGE, f"alignment_heads has ({layer}, {head}): the model has no such layer or head"
            )
        found.append(ops.gather(node, ops.constant(np.array([head])), ops.constant(1)))
    return found

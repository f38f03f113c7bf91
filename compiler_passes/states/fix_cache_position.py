"""Keeps the path for single tokens in exports that have another path for prompts.

State space models (Mamba) are exported with an input ``cache_position``. Its *length* chooses the path; on the path of a single
token its value, clamped, is the place in a convolution's window. A single token with the largest place is the recurrence itself,
from the first token on. The path of prompts starts without a state and cannot continue one. Therefore every token is a step of
its own, and ``rows`` is 1 in every program.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.errors import UnsupportedModelError
from staticllm.ports import CACHE_POSITION

from ..graph.step_graph import StepGraph, consumers, redirect

STAGE = "fix_cache_position"
LAST_PLACE = 1 << 30  # the graph clamps it to the end of its window


def fix_cache_position(graph: StepGraph) -> None:
    """Make ``cache_position`` a constant of length 1, if the graph reads only its length and a clamped place.

    Raises:
        UnsupportedModelError: another node reads it, or the model has keys and values as well.
    """
    parameter = graph.parameter(CACHE_POSITION)
    if parameter is None:
        return
    for reader in consumers(parameter.output(0)):
        if reader.get_type_name() not in ("ShapeOf", "Clamp", "Minimum"):
            what = f"{reader.get_type_name()} {reader.get_friendly_name()!r}"
            raise UnsupportedModelError(
                STAGE, f"{what} reads {CACHE_POSITION} as something other than a place in a window"
            )
    if graph.kv_states:
        raise UnsupportedModelError(STAGE, f"{CACHE_POSITION} beside keys and values is not supported")
    place = ops.constant(np.array([LAST_PLACE]), parameter.get_element_type())
    redirect(parameter.output(0), place.output(0))
    graph.model.remove_parameter(parameter)
    graph.max_rows = 1
    for port in graph.model.inputs:
        if port.partial_shape.rank.get_length() == 2:
            port.get_node().set_partial_shape(ov.PartialShape([1, 1]))
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"{CACHE_POSITION} is the end of the window: one token per call")

"""Mends shapes that repeat keys and values and have 0 where the number of tokens belongs.

Some converters write these, and plugins that fuse attention never look at them. Anything else that computes the node fails as
soon as it has more than one token.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ..graph.step_graph import StepGraph

STAGE = "mend_broadcasts"


def mend_broadcasts(graph: StepGraph) -> None:
    """Let every Broadcast keep a size of its input where its target has 0, unless that size is known to be 0 or 1."""
    mended = 0
    for node in graph.model.get_ordered_ops():
        if node.get_type_name() == "Broadcast" and node.get_attributes()["mode"] == "bidirectional":
            mended += _mend(node)
    if mended:
        graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"{mended} targets had 0 for a number of tokens")


def _mend(broadcast: ov.Node) -> bool:
    """Replace each 0 in the target of a Broadcast by 1, which keeps the input's size; return whether there was one."""
    target = broadcast.input_value(1).get_node()
    sizes = list(broadcast.input_value(0).get_partial_shape())
    parts = [target] if target.get_type_name() == "Constant" else [each.get_node() for each in target.input_values()]
    if target.get_type_name() not in {"Constant", "Concat"} or not sizes:
        return False
    numbers: list[int | None] = []
    for part in parts:
        length = part.get_output_partial_shape(0)
        if length.is_dynamic:
            return False
        is_known = part.get_type_name() == "Constant"
        numbers += part.data.reshape(-1).tolist() if is_known else [None] * int(np.prod(list(length.to_shape())))
    wrong = [
        place
        for place, size in zip(range(len(numbers) - len(sizes), len(numbers)), sizes, strict=True)
        if place >= 0 and numbers[place] == 0 and (size.is_dynamic or size.get_length() > 1)
    ]
    if wrong:
        least = np.isin(np.arange(len(numbers)), wrong).astype(np.int64)
        own = broadcast.input_value(1)
        ones = ops.convert(ops.constant(least), own.get_element_type().get_type_name())
        broadcast.input(1).replace_source_output(ops.maximum(own, ones).output(0))
    return bool(wrong)

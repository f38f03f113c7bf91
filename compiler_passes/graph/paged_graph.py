"""The graph of a decoder whose attention reads and writes pages, and the paged attentions in it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import openvino as ov

from staticllm.errors import UnsupportedModelError
from staticllm.ports import ATTENTION_MASK, BEAM_IDX, INPUT_IDS, POSITION_IDS

from .step_graph import StepGraph, evaluated, named_parameter, part_of, redirect, upstream

PAGE_SIZE = 32
"""The slots of a page in the CPU plugin of OpenVINO."""
OPERATION = "PagedAttentionExtension"
KEYS, VALUES, WINDOW = 3, 4, 10
"""Inputs of the operation: all pages of keys, those of values, and the tokens that a row sees, 0 if these are all."""
MASK, LEAST_SEEN = 3, -3e4
"""The input of an attention for its mask, and what a mask adds at least to the scores of what a row sees."""


@dataclass
class PagedGraph(StepGraph):
    """A decoder on its way from stateful IR to a program over pages. ``original``: a copy of the model as it was exported."""

    original: ov.Model = field(kw_only=True)


def paged_attentions(model: ov.Model) -> list[ov.Node]:
    """Return the paged attentions of a model, in the order of their layers."""
    return [node for node in model.get_ordered_ops() if node.get_type_name() == OPERATION]


def window_of(attention: ov.Node) -> int:
    """Return how many tokens a row of a paged attention sees; 0 if it sees all.

    Raises:
        UnsupportedModelError: that depends on an input.
    """
    try:
        return int(evaluated(part_of([attention.input_value(WINDOW)], []))[0])
    except RuntimeError as error:
        name = attention.get_friendly_name()
        raise UnsupportedModelError("page_attention", f"the window of {name!r} is not known before a call") from error


def windows_in(original: ov.Model, length: int) -> list[int]:
    """Return how many tokens the last of ``length`` sees in each attention of an exported model; 0 if it sees all.

    The masks of a call with that row alone are computed, so a window is found however the model writes it.

    Raises:
        UnsupportedModelError: a mask is not that of the last tokens.
    """
    model = original.clone()
    attentions = [node for node in model.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    masks = {
        (mask.get_node().get_instance_id(), mask.get_index()): mask
        for node in attentions
        if node.get_input_size() > MASK and (mask := node.input_value(MASK)).get_partial_shape().rank.get_length()
    }
    seen = dict(zip(masks, _last_rows(model, list(masks.values()), length), strict=True))
    found = list[int]()
    for node in attentions:
        mask = node.input_value(MASK) if node.get_input_size() > MASK else None
        row = seen.get((mask.get_node().get_instance_id(), mask.get_index())) if mask is not None else None
        num_seen = length if row is None else int(row.sum())
        if row is not None and (len(row) != length or not num_seen or not row[-num_seen:].all()):
            raise UnsupportedModelError(
                "page_attention", f"{node.get_friendly_name()!r} sees other tokens than the last"
            )
        found.append(num_seen if num_seen < length else 0)
    return found


def _last_rows(
    model: ov.Model, masks: list[ov.Output], length: int
) -> list[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Return which of ``length`` tokens the last one sees by each mask."""
    before = list[ov.Node]()
    for read in [node for node in upstream([mask.get_node() for mask in masks]) if node.get_type_name() == "ReadValue"]:
        state = named_parameter(f"state.{len(before)}", read.get_output_partial_shape(0), read.get_element_type())
        redirect(read.output(0), state.output(0))
        before.append(state)
    needed = {node.get_instance_id() for node in upstream([mask.get_node() for mask in masks])}
    inputs = [node for node in (*model.get_parameters(), *before) if node.get_instance_id() in needed]
    values = {INPUT_IDS: [[0]], ATTENTION_MASK: np.ones((1, length)), POSITION_IDS: [[length - 1]], BEAM_IDX: [0]}
    feeds = []
    for node in inputs:
        dtype = node.get_element_type().to_dtype()
        known = [values[name] for name in node.output(0).get_names() & values.keys()]
        shape = [
            dim.get_length() if dim.is_static else length - 1 if place else 1
            for place, dim in enumerate(node.get_output_partial_shape(0))
        ]
        feeds.append(np.array(known[0], dtype) if known else np.zeros(shape, dtype))
    rows = [row.reshape(-1, row.shape[-1])[-1] for row in evaluated(part_of(masks, inputs), feeds)] if masks else []
    return [row if row.dtype == np.bool_ else row >= LEAST_SEEN for row in rows]

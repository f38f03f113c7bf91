"""The graph of a decoder whose attention reads and writes pages, and the paged attentions in it."""

from __future__ import annotations

from dataclasses import dataclass, field

import openvino as ov

from staticllm.errors import UnsupportedModelError

from .step_graph import StepGraph, evaluated, part_of

PAGE_SIZE = 32
"""The slots of a page in the CPU plugin of OpenVINO."""
OPERATION = "PagedAttentionExtension"
KEYS, VALUES, WINDOW = 3, 4, 10
"""Inputs of the operation: all pages of keys, those of values, and the tokens that a row sees, 0 if these are all."""


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

"""Lets paged attention compute in bf16, with slots of bf16, in a program that computes in f32.

Where a processor multiplies bf16 fast, 8-bit products in f32 may still be faster for few rows, so that the program computes in
f32; attention over thousands of tokens is not, and slots of f32 take twice the memory.
"""

from __future__ import annotations

from openvino import opset13 as ops

from ..graph.paged_graph import PagedGraph, paged_attentions

STAGE = "narrow_attention"


def narrow_attention(graph: PagedGraph, is_wanted: bool) -> None:
    """Convert what paged attentions read to bf16, and what they compute to f32, if that ``is_wanted``."""
    attentions = paged_attentions(graph.model) if is_wanted else []
    for attention in attentions:
        targets = attention.output(0).get_target_inputs()
        for place in range(3):  # queries, keys and values
            port = attention.input(place)
            port.replace_source_output(ops.convert(port.get_source_output(), "bf16").output(0))
        wide = ops.convert(attention.output(0), "f32")
        for target in targets:
            target.replace_source_output(wide.output(0))
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"{len(attentions)} attentions compute in bf16")

"""Merges projections that are compressed in groups, for NPUs: query, key and value, but not gate and up.

Groups are stored first (``lead_groups``), so the weights of one projection cannot be a part of merged ones, and all programs of a
model have the same form. Merged, query, key and value take 6 % less time with one row and 2 % more with 1024. Gate and up
are slower: their product is no longer computed in tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import openvino as ov

from ..graph.compressed_matrix import find_compressed_matrices
from ..graph.step_graph import StepGraph, consumers
from .gate_last import ACTIVATIONS
from .merge_projections import find_groups, join_constants, merge_group

STAGE = "merge_grouped"
_BETWEEN = ACTIVATIONS | {"Add", "Convert"}


def merge_grouped(graph: StepGraph) -> None:
    """Merge every group of projections that are compressed in groups alike and are not the factors of one product."""
    grouped = {
        matrix.product.get_instance_id() for matrix in find_compressed_matrices(graph.model) if matrix.is_grouped
    }
    merged = 0
    groups = find_groups(graph.model, lambda node: node.get_instance_id() in grouped)
    for group in groups:
        if not _are_factors(group):
            merged += merge_group(group, join_constants)
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"{merged} of {len(groups)} groups of projections are one matrix in all programs")


def _are_factors(group: Sequence[ov.Node]) -> bool:
    """Return whether two of these products are multiplied with each other, after a bias or an activation."""
    seen = set[int]()
    for node in group:
        own = {reader.get_instance_id() for reader in _products(node)}
        if own & seen:
            return True
        seen |= own
    return False


def _products(node: ov.Node) -> list[ov.Node]:
    found = []
    for reader in consumers(node.output(0)):
        if reader.get_type_name() == "Multiply":
            found.append(reader)
        elif reader.get_type_name() in _BETWEEN:
            found.extend(_products(reader))
    return found

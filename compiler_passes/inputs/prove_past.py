"""Proves that a text may run in chunks: its rows then see the keys and values of earlier calls in place of their own.

It runs one text whole through the original and in three chunks through the graph that ``expose_past`` will make.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.devices import get_core
from staticllm.ports import HIDDEN, INPUT_IDS, KEPT_ROWS, PAST, POOL, POSITION_IDS, PRESENT, TOKEN_TYPE_IDS

from ..graph.control_values import EXACT, random_ids, run_with
from ..graph.distinct_part import distinct_end
from ..graph.encoder_graph import EncoderGraph
from ..graph.step_graph import part_of
from .expose_encoder_mask import visible
from .expose_past import ROW_AXIS, continued_graph
from .prove_packing import MOST_ROWS, TOLERANCE, ProofText, run_alone

STAGE = "prove_past"
Arrays = Mapping[str, NDArray[np.float32]]


def prove_past(graph: EncoderGraph) -> None:
    """Compare a text that runs in chunks with the original; the joins are forgotten if that is not the same.

    It comes before pooling, because it compares hidden states, up to the layer from which on the others repeat earlier ones.
    """
    if not graph.joins:
        return
    reason = _reason_against(graph)
    if reason is None:
        worst = _difference_in_chunks(graph)
        if worst > TOLERANCE:
            reason = f"in chunks it differs by {worst:.0e} of the largest value"
        else:
            graph.note(STAGE, f"texts may run in chunks: within {worst:.0e} of the original")
    if reason is not None:
        graph.joins = []
        graph.note(STAGE, f"every text runs whole: {reason}")


def _reason_against(graph: EncoderGraph) -> str | None:
    known = {node.get_instance_id() for node in graph.model.get_ordered_ops()}
    if not all(join.get_instance_id() in known for join in graph.joins):
        return "a pass has replaced what appends new rows to a state"
    if not graph.is_packable:
        return "texts cannot share a sequence"
    if not all(kind.after == 0 for kind in graph.encoder_masks):
        return "tokens see later ones"
    return None if graph.parameter(POSITION_IDS) is not None else "it takes no positions"


def _difference_in_chunks(graph: EncoderGraph) -> float:
    """Return the largest difference of a text in three chunks from the original, as a share of the largest value."""
    end = None if graph.is_per_text else distinct_end(graph.model)
    original = _same_end(graph, end)
    if original is None:
        end = None
        original = graph.original
    length = min(graph.num_rows, MOST_ROWS)
    ids = random_ids(graph.original, (length,), seed=21)
    (wanted,) = run_alone(graph, original, [ProofText(0, np.arange(length), ids)])
    program = get_core().compile_model(continued_graph(graph, end), "CPU", EXACT)
    found = list[NDArray[np.float32]]()
    past = dict[str, NDArray[np.float32]]()
    for part in np.array_split(np.arange(length), min(3, length)):
        values, new = _chunk(graph, program, ids, part, past)
        past = {name: np.concatenate((past[name], rows), ROW_AXIS) if past else rows for name, rows in new.items()}
        found.append(values)
    actual = found[-1] if graph.is_per_text else np.concatenate(found)
    scale = float(np.abs(wanted).max())
    worst = float(np.abs(wanted - actual).max())
    return worst / scale if np.isfinite(worst) and scale else np.inf


def _same_end(graph: EncoderGraph, end: ov.Node | None) -> ov.Model | None:
    """Return the original up to the node of the same name and type; None if there is none."""
    if end is None:
        return None
    copy = graph.original.clone()
    same = [
        node
        for node in copy.get_ops()
        if (node.get_friendly_name(), node.get_type_name()) == (end.get_friendly_name(), end.get_type_name())
    ]
    if len(same) != 1:
        return None
    return part_of([same[0].output(0)], copy.get_parameters())


def _chunk(
    graph: EncoderGraph, program: ov.CompiledModel, ids: NDArray[np.int64], places: NDArray[np.intp], past: Arrays
) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
    """Run the tokens at ``places``, and return their hidden states, or the vector of the text, and their keys and values."""
    count = len(places)
    end = int(places[-1]) + 1
    feeds: dict[str, NDArray[np.generic]] = {
        INPUT_IDS: ids[None, places],
        TOKEN_TYPE_IDS: np.zeros((1, count), np.int64),
        POSITION_IDS: graph.first_position + places[None].astype(np.int64),
        KEPT_ROWS: np.arange(count, dtype=np.int64),
        POOL: np.eye(1, count, count - 1, dtype=np.float32),
    }
    for kind in graph.encoder_masks:
        seen = visible(kind, end)[places]
        feeds[kind.port_name] = np.where(seen, 0, HIDDEN).astype(np.float32)[None, None]
    for port in program.inputs:
        name = port.get_any_name()
        if name.startswith(PAST):
            shape = port.get_partial_shape()
            empty = np.zeros((1, shape[1].get_length(), 0, shape[3].get_length()), np.float32)
            feeds[name] = past.get(name.replace(PAST, PRESENT), empty)
    values = run_with(program, feeds)
    names = [port.get_any_name() if port.get_names() else "" for port in program.outputs]
    new = {name: np.array(values[index]) for index, name in enumerate(names) if name.startswith(PRESENT)}
    return np.array(values[0], np.float32).reshape(-1, values[0].shape[-1]), new

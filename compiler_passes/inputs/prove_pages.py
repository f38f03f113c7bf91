"""Proves that paged attention computes what the original model does, by running the first layers of both once.

Two sequences run together through the paged graph, in chunks and single tokens, and each alone through the original. So the wrong
slopes of a bias by distance, say, show as a difference. Layers whose attention only repeats earlier ones are left out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError
from staticllm.ports import (
    ATTENTION_MASK,
    BEAM_IDX,
    BLOCK_INDICES,
    BLOCK_INDICES_BEGINS,
    INPUT_IDS,
    MAX_CONTEXT_LEN,
    PAST_LENS,
    POSITION_IDS,
    SUBSEQUENCE_BEGINS,
)

from ..graph.control_values import EXACT, random_ids, run_with
from ..graph.paged_graph import PAGE_SIZE, PagedGraph, paged_attentions, window_of
from ..graph.step_graph import consumers, named_parameter, part_of, redirect, upstream

STAGE = "prove_pages"
LENGTHS = (70, 45)
"""Tokens of the two sequences, and more of the first one where a window is longer."""
CUTS = ((0, 0), (40, 20), (67, 42), (68, 43), (70, 45))
"""The tokens of each that have run before and after each call; before the last two, as many as are left."""
STATE = "before."
"""Begins the names of inputs for states of the original."""
FIRST_CALL = 33
"""Tokens of the first call of the original; what it keeps of them is read in the second."""
BEHIND_WINDOW = 40
"""Tokens that run behind the longest window."""
EXACT_KEYS = {**EXACT, "KV_CACHE_PRECISION": "f32"}
TOLERANCE = 1e-4
"""Of the largest value. In f32 the differences of a right graph are some 1e-6, those of a wrong one some 1e-2."""
Values = NDArray[np.float32]


def prove_pages(graph: PagedGraph) -> None:
    """Compare what both graphs compute up to the attention of the last layer that repeats no earlier one.

    Raises:
        UnsupportedModelError: they differ, or the place is not found in both.
    """
    layer, attention = _last_distinct(graph)
    paged_end = _read_by_product(attention)
    end = _same_in(graph.original, paged_end)
    longest = max(window_of(node) for node in paged_attentions(graph.model)[: layer + 1])
    more = max(0, longest + BEHIND_WINDOW - LENGTHS[0])
    texts = [random_ids(graph.original, (length,), seed) for seed, length in enumerate((LENGTHS[0] + more, LENGTHS[1]))]
    wanted = _alone(_with_states(graph.original, end), texts)
    found = _together(
        _until(graph.model, paged_end), texts, [(one + more if one > 40 else one, two) for one, two in CUTS]
    )
    worst = max(_difference(one, other) for one, other in zip(wanted, found, strict=True))
    if not worst <= TOLERANCE:
        raise UnsupportedModelError(
            STAGE, f"paged attention computes other values than the model: {worst:.0e} of the largest in layer {layer}"
        )
    graph.note(STAGE, f"layers up to {layer} are within {worst:.0e} of the original")


def _last_distinct(graph: PagedGraph) -> tuple[int, ov.Node]:
    """Return the last layer whose attention is the first of its kind, and the attention."""
    attentions = paged_attentions(graph.model)
    first: dict[Hashable, int] = {}
    for layer, node in enumerate(attentions):
        first.setdefault((window_of(node), *(str(value.get_partial_shape()) for value in node.input_values())), layer)
    layer = max(first.values())
    return layer, attentions[layer]


def _read_by_product(attention: ov.Node) -> ov.Output:
    """Return what the product behind an attention reads."""
    node = attention
    for _ in range(16):
        readers = [reader for reader in consumers(node.output(0)) if reader.get_type_name() != "ShapeOf"]
        if not readers:
            break
        products = [reader for reader in readers if reader.get_type_name() == "MatMul"]
        if products:
            return products[0].input_value(0)
        node = readers[0]
    raise UnsupportedModelError(STAGE, f"no product follows {attention.get_friendly_name()!r}")


def _same_in(model: ov.Model, output: ov.Output) -> ov.Output:
    """Return what the product of the same name reads in another graph."""
    (name, *_) = [node.get_friendly_name() for node in consumers(output) if node.get_type_name() == "MatMul"]
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul" and node.get_friendly_name() == name:
            return node.input_value(0)
    raise UnsupportedModelError(STAGE, f"the original has no product {name!r}")


def _until(model: ov.Model, end: ov.Output) -> ov.Model:
    """Return a copy of a graph without states up to ``end``, with the inputs that it needs."""
    copy, output = _copied(model, end)
    needed = {node.get_instance_id() for node in upstream([output.get_node()])}
    return part_of([output], [node for node in copy.get_parameters() if node.get_instance_id() in needed])


def _with_states(model: ov.Model, end: ov.Output) -> ov.Model:
    """Return a copy of a graph up to ``end``, with the states that it needs as inputs and further outputs, in their order.

    A compiled model with states of its own leaves a thread in the process (OpenVINO 2026.4).
    """
    copy, output = _copied(model, end)
    inputs = list[ov.Node]()
    outputs = list[ov.Output]()
    assigned = {sink.get_variable_id(): sink.input_value(0) for sink in copy.get_sinks()}
    for read in [node for node in upstream([output.get_node()]) if node.get_type_name() == "ReadValue"]:
        before = named_parameter(f"{STATE}{len(inputs)}", read.get_output_partial_shape(0), read.get_element_type())
        redirect(read.output(0), before.output(0))
        inputs.append(before)
        outputs.append(assigned[read.get_variable_id()])
    needed = {node.get_instance_id() for node in upstream([output.get_node(), *(each.get_node() for each in outputs)])}
    others = [node for node in copy.get_parameters() if node.get_instance_id() in needed]
    return part_of([output, *outputs], [*others, *inputs])


def _copied(model: ov.Model, end: ov.Output) -> tuple[ov.Model, ov.Output]:
    places = {node.get_instance_id(): place for place, node in enumerate(model.get_ordered_ops())}
    copy = model.clone()
    return copy, copy.get_ordered_ops()[places[end.get_node().get_instance_id()]].output(end.get_index())


def _alone(model: ov.Model, texts: Sequence[NDArray[np.int64]]) -> list[Values]:
    """Return what the original computes for each text, in two calls: ``[length, width]``."""
    program = get_core().compile_model(model, "CPU", EXACT)
    found = []
    for ids in texts:
        states = {
            port.get_any_name(): np.zeros(_empty(port.get_partial_shape()), port.get_element_type().to_dtype())
            for port in program.inputs
            if port.get_any_name().startswith(STATE)
        }
        parts = []
        for start, end in ((0, FIRST_CALL), (FIRST_CALL, len(ids))):
            feeds: Mapping[str, NDArray[Any]] = {
                INPUT_IDS: ids[None, start:end],
                ATTENTION_MASK: np.ones((1, end), np.int64),
                POSITION_IDS: np.arange(start, end)[None],
                BEAM_IDX: np.zeros(1, np.int32),
                **states,
            }
            values, *new = run_with(program, feeds).values()
            states = {name: value.copy() for name, value in zip(states, new, strict=True)}
            parts.append(np.array(values).reshape(end - start, -1))
        found.append(np.concatenate(parts))
    return found


def _empty(shape: ov.PartialShape) -> list[int]:
    """Return the sizes of a state of one sequence without tokens: its batch is 1, and no other size but the tokens' is open."""
    return [dim.get_length() if dim.is_static else int(place == 0) for place, dim in enumerate(shape)]


def _together(model: ov.Model, texts: Sequence[NDArray[np.int64]], cuts: Sequence[tuple[int, int]]) -> list[Values]:
    """Return the same of calls with rows of both texts."""
    program = get_core().compile_model(model, "CPU", EXACT_KEYS)
    most = [-(-len(ids) // PAGE_SIZE) for ids in texts]
    tables = [np.arange(most[0]), most[0] + np.arange(most[1])]
    request = program.create_infer_request()
    for port in program.inputs:
        if port.get_any_name().startswith("pages."):
            shape = [sum(most) if dim.is_dynamic else dim.get_length() for dim in port.get_partial_shape()]
            if shape[2] != PAGE_SIZE:
                raise UnsupportedModelError(STAGE, f"the device has pages of {shape[2]} slots, not of {PAGE_SIZE}")
            request.set_tensor(port, ov.Tensor(port.get_element_type(), ov.Shape(shape)))
    found: list[list[Values]] = [[], []]
    for before, after in pairwise(cuts):
        feeds = _call(texts, tables, before, after)
        names = {name for port in program.inputs for name in port.get_names()}
        (values,) = request.infer({name: value for name, value in feeds.items() if name in names}).values()
        counts = [end - start for start, end in zip(before, after, strict=True)]
        rows = np.array(values).reshape(sum(counts), -1)
        for place, part in enumerate((rows[: counts[0]], rows[counts[0] :])):
            found[place].append(part)
    return [np.concatenate(parts) for parts in found]


def _call(
    texts: Sequence[NDArray[np.int64]],
    tables: Sequence[NDArray[np.intp]],
    before: Sequence[int],
    after: Sequence[int],
) -> Mapping[str, NDArray[np.generic]]:
    counts = [end - start for start, end in zip(before, after, strict=True)]
    used = [table[: -(-end // PAGE_SIZE)] for table, end in zip(tables, after, strict=True)]
    parts = list(zip(texts, before, after, strict=True))
    return {
        INPUT_IDS: np.concatenate([ids[start:end] for ids, start, end in parts]),
        POSITION_IDS: np.concatenate([np.arange(start, end) for _, start, end in parts]),
        PAST_LENS: np.array(before, np.int32),
        SUBSEQUENCE_BEGINS: np.array([0, *np.cumsum(counts)], np.int32),
        BLOCK_INDICES: np.concatenate(used).astype(np.int32),
        BLOCK_INDICES_BEGINS: np.array([0, *np.cumsum([len(table) for table in used])], np.int32),
        MAX_CONTEXT_LEN: np.array(max(after), np.int32),
    }


def _difference(one: Values, other: Values) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float(np.abs(one - other).max() / (np.abs(one).max() + 1e-9))

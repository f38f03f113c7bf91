"""Lets the host pick the rows from which a cross-encoder computes its scores, or a model that pools by itself its embeddings.

A classifier reads one vector per sequence: of the first token, of the last, or a mean. Where the axis of rows disappears, the
vectors of all texts are computed instead, by a product with the input ``pool [R, B*S]``. Which of the poolings the model does is
found by evaluating that part alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.core import Pooling
from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError
from staticllm.ports import EMBEDDINGS, INPUT_IDS, POOL, SCORES

from ..graph.control_values import (
    EXACT,
    PROBE_BATCH,
    PROBE_ROWS,
    Value,
    at_sizes,
    close,
    divide,
)
from ..graph.encoder_graph import EncoderGraph
from ..graph.step_graph import consumers, name_port, part_of, redirect

STAGE = "pool_scores"
PROBE_IDS = (0, 1, 2)
"""The texts of the probes: a graph that looks for the last token by its id takes one of these for padding, not the others."""
_STEPS = 4
"""The most nodes of a pooling after the one where the axis of rows disappears: a division, squeezes."""


def pool_scores(graph: EncoderGraph) -> None:
    """Replace the pooling of a model with one vector per text. A model with hidden states is left alone.

    Raises:
        UnsupportedModelError: the pooling is not the first token, the last token or the mean.
    """
    if not graph.is_per_text:
        return
    node, hidden = _pooling_node(graph.model)
    for _ in range(_STEPS):
        pooling = _pooling_of(graph.model, node, hidden)
        if pooling is not None:
            _replace(graph, node, hidden)
            graph.pooling = pooling
            graph.note(STAGE, f"{node.get_friendly_name()!r} pools by {pooling!r}")
            return
        readers = consumers(node.output(0))
        if len(readers) != 1 or readers[0].get_type_name() == "Result":
            break
        node = readers[0]
    raise UnsupportedModelError(
        STAGE,
        f"{node.get_type_name()} {node.get_friendly_name()!r} pools neither the first token, the last, nor the mean",
    )


def _pooling_node(model: ov.Model) -> tuple[ov.Node, ov.Output]:
    """Return the only node where the axis of rows disappears, and the hidden states ``[B, S, width]`` that it reads."""
    control = divide(model)
    probe = at_sizes(model, PROBE_BATCH, PROBE_ROWS[0])
    found = []
    for node, sized in zip(model.get_ordered_ops(), probe.get_ordered_ops(), strict=True):
        if node.get_instance_id() not in control.data or node.get_type_name() in ("Result", "ShapeOf"):
            continue
        shape = sized.input_value(0).get_partial_shape()
        is_hidden = len(shape) == 3 and [str(dim) for dim in list(shape)[:2]] == [str(PROBE_BATCH), str(PROBE_ROWS[0])]
        if is_hidden and str(PROBE_ROWS[0]) not in [str(dim) for dim in sized.get_output_partial_shape(0)]:
            found.append(node)
    if len(found) != 1:
        raise UnsupportedModelError(STAGE, f"the rows are pooled at {len(found)} nodes, not at one")
    return found[0], found[0].input_value(0)


def _pooling_of(model: ov.Model, node: ov.Node, hidden: ov.Output) -> Pooling | None:
    """Return what the graph computes from ``hidden`` to ``node``; None if it is no pooling."""
    places = {other.get_instance_id(): index for index, other in enumerate(model.get_ordered_ops())}
    copy = at_sizes(model, PROBE_BATCH, PROBE_ROWS[1])
    nodes = copy.get_ordered_ops()
    producer = nodes[places[hidden.get_node().get_instance_id()]].output(hidden.get_index())
    shape = producer.get_partial_shape()
    if shape.is_dynamic:
        return None
    values: Value = np.random.default_rng(0).normal(size=shape.to_shape()).astype(np.float32)
    parameter = ops.parameter(shape, producer.get_element_type())
    redirect(producer, parameter.output(0))
    end = nodes[places[node.get_instance_id()]].output(0)
    part = part_of([end], [parameter, *copy.get_parameters()])
    program = get_core().compile_model(part, "CPU", EXACT)
    votes: Counter[Pooling | None] = Counter(
        _named(_pooled(program, values, copy.get_parameters(), ids), values) for ids in PROBE_IDS
    )
    found, count = votes.most_common(1)[0]
    return found if count > len(PROBE_IDS) / 2 else None


def _pooled(program: ov.CompiledModel, values: Value, parameters: Sequence[ov.Node], ids: int) -> Value:
    """Return what the part computes from the hidden states ``values`` of texts in which every token is ``ids``."""
    feeds = {0: values} | {
        1 + index: np.full(
            list(other.get_output_partial_shape(0).to_shape()),
            ids if INPUT_IDS in other.output(0).get_names() else 0,
            other.get_output_element_type(0).to_dtype(),
        )
        for index, other in enumerate(parameters)
    }
    return np.array(program(feeds)[0]).reshape(PROBE_BATCH, -1)


def _named(pooled: Value, values: Value) -> Pooling | None:
    expected: dict[Pooling, Value] = {"first": values[:, 0], "last": values[:, -1], "mean": values.mean(axis=1)}
    return next(
        (name for name, value in expected.items() if pooled.shape == value.shape and close(pooled, value)), None
    )


def _replace(graph: EncoderGraph, node: ov.Node, hidden: ov.Output) -> None:
    """Let the readers of ``node`` read the pooled rows, ``[R, width]``, in its rank, and name the output."""
    pooled = pooled_rows(graph, hidden)
    if len(node.get_output_partial_shape(0)) == 3:
        pooled = ops.unsqueeze(pooled, ops.constant(1)).output(0)
    redirect(node.output(0), pooled)
    (result,) = graph.model.get_results()
    name_port(result, SCORES if graph.has_scores else EMBEDDINGS)
    graph.model.validate_nodes_and_infer_types()


def pooled_rows(graph: EncoderGraph, hidden: ov.Output) -> ov.Output:
    """Add the input ``pool [R, B*S]`` and return its product with the hidden states ``[B, S, width]``: ``[R, width]``."""
    pool = graph.add_parameter(POOL, ov.PartialShape([-1, -1]), ov.Type.f32)
    width = hidden.get_partial_shape()[2]
    if width.is_dynamic:
        raise UnsupportedModelError(STAGE, "the size of the hidden states is not known")
    rows = ops.reshape(hidden, np.array([-1, width.get_length()]), special_zero=False)
    return ops.matmul(ops.convert_like(pool, rows), rows, transpose_a=False, transpose_b=False).output(0)

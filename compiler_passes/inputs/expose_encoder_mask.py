"""Replaces the masks of an encoder by inputs, so that texts can share a sequence.

Every attention gets an additive input ``mask.<kind>`` of shape ``[B, 1, S, S]`` right before its softmax. What the model itself
adds there is evaluated. If it only hides cells, it is removed, and the kind of the input says what it hid. Anything else, such as
a bias by distance, stays in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from staticllm.core import EncoderMask
from staticllm.errors import UnsupportedModelError
from staticllm.ports import HIDDEN, HIDDEN_BELOW

from ..graph.attention import FUSED, MASK_PORT
from ..graph.control_values import (
    PROBE_BATCH,
    PROBE_ROWS,
    Control,
    Key,
    Value,
    at_sizes,
    divide,
    evaluate,
    key_of,
)
from ..graph.encoder_graph import EncoderGraph
from ..graph.step_graph import redirect

STAGE = "expose_encoder_mask"
_PASSED = frozenset({"Convert", "Reshape", "Maximum", "Minimum", "Clamp", "Multiply", "Divide"})


@dataclass(frozen=True)
class Term:
    """Something that a model puts on the scores of an attention."""

    port: ov.Input
    """The input that reads it."""
    data_port: int
    when: bool | None = None
    """For a Select, the value of its condition that keeps the scores."""

    @property
    def key(self) -> Key:
        return self.port.get_node().get_instance_id(), self.port.get_index()

    @property
    def producer(self) -> ov.Output:
        """The output that holds it."""
        return self.port.get_source_output()

    def hides(self, value: Value) -> NDArray[np.bool_] | None:
        """Return which cells it hides; None if it does anything but hide cells."""
        if value.dtype == np.bool_:
            return np.not_equal(value, True if self.when is None else self.when)
        hidden: NDArray[np.bool_] = value < HIDDEN_BELOW
        return hidden if self.when is None and not np.any(value[~hidden]) else None


def expose_encoder_mask(graph: EncoderGraph) -> None:
    """Give every attention a mask input, and remove what only hides cells.

    Raises:
        UnsupportedModelError: there is no attention, or one has scores of an unknown layout.
    """
    _limit_rows(graph)
    control = divide(graph.model)
    sites = list(_attentions(graph.model, control))
    if not sites:
        raise UnsupportedModelError(
            STAGE, "the model has no attention, fused or written out: texts cannot be told apart"
        )
    terms = [list(_terms(node, control)) for node in sites]
    kinds = _kinds(graph, [term for found in terms for term in found if _is_known(term.port, control)])
    graph.query_heads = _heads_of(graph.model, sites)
    for node, found in zip(sites, terms, strict=True):
        graph.layer_masks.append(_expose(graph, node, found, kinds))
    graph.model.validate_nodes_and_infer_types()
    labels = ", ".join(f"{label} in {graph.layer_masks.count(label)}" for label in dict.fromkeys(graph.layer_masks))
    graph.note(STAGE, f"{labels} of {len(sites)} attentions")


def _limit_rows(graph: EncoderGraph) -> None:
    """Find the most rows that the model's tables have, for example of positions: with more, shapes or indices do not fit."""
    probe = at_sizes(graph.model, PROBE_BATCH, PROBE_ROWS[0]).get_ordered_ops()
    places = {node.get_instance_id(): index for index, node in enumerate(graph.model.get_ordered_ops())}
    outputs = [port.get_source_output() for port in divide(graph.model).boundaries]
    singles = {key_of(value): value for value in outputs if not _is_by_pairs(probe[places[key_of(value)[0]]])}

    def fits(rows: int) -> bool:
        try:
            evaluate(graph.model, list(singles.values()), 1, rows)
        except RuntimeError:
            return False
        return True

    low = PROBE_ROWS[1]
    high = graph.num_rows
    if not fits(high):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        graph.note(STAGE, f"at most {low} rows: the model's tables have no more")
        graph.limit_rows(low)


def _is_by_pairs(probe: ov.Node) -> bool:
    shapes = ([str(dim) for dim in output.get_partial_shape()] for output in probe.outputs())
    return any(shape.count(str(PROBE_ROWS[0])) > 1 for shape in shapes)


def _attentions(model: ov.Model, control: Control) -> Iterator[ov.Node]:
    """Yield the fused attentions, and each softmax of data over scores ``[..., S, S]``."""
    rows = PROBE_ROWS[0]
    for node, probe in zip(model.get_ordered_ops(), at_sizes(model, PROBE_BATCH, rows).get_ordered_ops(), strict=True):
        kind = node.get_type_name()
        if node.get_instance_id() not in control.data or kind not in (FUSED, "Softmax"):
            continue
        shape = probe.get_output_partial_shape(0)
        if kind == FUSED:
            if len(shape) != 4:
                raise UnsupportedModelError(
                    STAGE, f"attention {node.get_friendly_name()!r} has rank {len(shape)}: must be 4"
                )
            yield node
        elif len(shape) >= 3 and [str(dim) for dim in list(shape)[-2:]] == [str(rows)] * 2:
            axis = node.get_attributes()["axis"] % len(shape)
            if axis != len(shape) - 1 or len(shape) > 4:
                raise UnsupportedModelError(
                    STAGE,
                    f"softmax {node.get_friendly_name()!r} has scores of the shape {shape}: must be [B, heads, S, S]",
                )
            yield node


def _heads_of(model: ov.Model, attentions: list[ov.Node]) -> list[int]:
    """Return the number of heads of each attention, or 0 if its shape does not tell."""
    places = {node.get_instance_id(): index for index, node in enumerate(model.get_ordered_ops())}
    probe = at_sizes(model, PROBE_BATCH, PROBE_ROWS[0]).get_ordered_ops()
    shapes = [probe[places[node.get_instance_id()]].get_output_partial_shape(0) for node in attentions]
    return [shape[1].get_length() if len(shape) == 4 and shape[1].is_static else 0 for shape in shapes]


def _terms(attention: ov.Node, control: Control) -> Iterator[Term]:
    """Yield what is put on the scores of an attention, from the softmax upwards."""
    if attention.get_type_name() == FUSED:
        if attention.get_input_size() > MASK_PORT:
            yield Term(attention.input(MASK_PORT), 0)
        return
    node = attention.input_value(0).get_node()
    while node.get_instance_id() in control.data:
        data = [port.get_index() for port in node.inputs() if not _is_known(port, control)]
        kind = node.get_type_name()
        if kind == "Add" and len(data) == 1:
            yield Term(node.input(1 - data[0]), data[0])
        elif kind == "Select" and len(data) == 1 and data[0] > 0:
            yield Term(node.input(0), data[0], data[0] == 1)
        elif kind not in _PASSED or data != [0]:
            return
        node = node.input_value(data[0]).get_node()


def _is_known(port: ov.Input, control: Control) -> bool:
    return port.get_source_output().get_node().get_instance_id() not in control.data


def _kinds(graph: EncoderGraph, terms: list[Term]) -> dict[Key, EncoderMask]:
    """Return, by the key of a term, the kind of each one that only hides cells, as one of the known kinds does."""
    producers: dict[tuple[Key, bool | None], list[Term]] = {}
    for term in terms:
        producers.setdefault((key_of(term.producer), term.when), []).append(term)
    kinds = {}
    for same in producers.values():
        first = same[0]
        if first.when is not None and not _replaces_by_hidden(graph, first):
            continue
        (value,) = evaluate(graph.model, [first.producer], 1, graph.num_rows)
        hidden = first.hides(value)
        kind = None if hidden is None else kind_of(hidden, graph.num_rows)
        if kind is not None:
            kinds.update({term.key: kind for term in same})
    return kinds


def _replaces_by_hidden(graph: EncoderGraph, term: Term) -> bool:
    """Return whether the other branch of a Select holds numbers that hide a cell."""
    other = term.port.get_node().input_value(3 - term.data_port)
    (value,) = evaluate(graph.model, [other], 1, PROBE_ROWS[0])
    return bool(np.all(value < HIDDEN_BELOW))


def kind_of(hidden: NDArray[np.bool_], rows: int) -> EncoderMask | None:
    """Return the kind of mask that hides these cells, ``[..., S, S]`` or broadcast to it; None if no kind does."""
    if not hidden.any():
        return EncoderMask()
    if hidden.ndim < 2 or hidden.shape[-2:] != (rows, rows):
        return None
    planes = hidden.reshape(-1, rows, rows)
    if not (planes == planes[0]).all() or planes[0].diagonal().any():
        return None
    before = rows - 1 - int(np.argmin(planes[0][-1]))
    after = int(np.argmin(planes[0][0][::-1]))
    after = rows - 1 - after
    kind = EncoderMask(before if before < rows - 1 else None, after if after < rows - 1 else None)
    is_known = kind.after in (0, kind.before)
    return kind if is_known and np.array_equal(planes[0], ~visible(kind, rows)) else None


def visible(kind: EncoderMask, rows: int) -> NDArray[np.bool_]:
    """Return the cells that a mask shows in a text of ``rows`` tokens, ``[rows, rows]``, by query and key."""
    places = np.arange(rows)
    seen: NDArray[np.bool_] = kind.sees(places - places[:, None])
    return seen


def _expose(graph: EncoderGraph, attention: ov.Node, terms: list[Term], kinds: dict[Key, EncoderMask]) -> str:
    """Put a mask input on one attention, and return what its scores get."""
    kind = EncoderMask()
    left = 0
    for term in terms:
        own = kinds.get(term.key)
        if own is None or (own != EncoderMask() and kind not in (EncoderMask(), own)):
            left += 1
            continue
        kind = kind if own == EncoderMask() else own
        if attention.get_type_name() != FUSED:
            node = term.port.get_node()
            redirect(node.output(0), node.input_value(term.data_port))
    if attention.get_type_name() == FUSED:
        if attention.get_attributes()["causal"]:
            kind = EncoderMask(after=0)
            left = 0
        _on_fused(graph, attention, kind, bool(left))
    else:
        _on_softmax(graph, attention, kind)
    return kind.label + (" + a bias" if left else "")


def _mask(graph: EncoderGraph, kind: EncoderMask, element_type: ov.Type) -> ov.Output:
    """Return the mask input of a kind, ``[B, 1, S, S]``, in the type of the scores."""
    if kind not in graph.encoder_masks:
        graph.encoder_masks.append(kind)
        graph.add_parameter(kind.port_name, ov.PartialShape([-1, 1, -1, -1]), ov.Type.f32)
    parameter = graph.parameter(kind.port_name)
    assert parameter is not None
    same = parameter.get_element_type() == element_type
    return parameter.output(0) if same else ops.convert(parameter, element_type.get_type_name()).output(0)


def _on_fused(graph: EncoderGraph, attention: ov.Node, kind: EncoderMask, keeps_own: bool) -> None:
    mask = _mask(graph, kind, attention.get_output_element_type(0))
    if keeps_own:
        own = attention.input_value(MASK_PORT)
        if own.get_element_type() == ov.Type.boolean:
            numbers = (ops.convert_like(ops.constant(np.float32(number)), mask) for number in (0.0, HIDDEN))
            own = ops.select(own, *numbers).output(0)
        mask = ops.add(own, mask).output(0)
    if attention.get_input_size() > MASK_PORT and not attention.get_attributes()["causal"]:
        attention.input(MASK_PORT).replace_source_output(mask)
        return
    query, key, value, *others = attention.input_values()
    fused = ops.scaled_dot_product_attention(query, key, value, mask, *others[1:], causal=False)
    fused.set_friendly_name(attention.get_friendly_name())
    redirect(attention.output(0), fused.output(0))


def _on_softmax(graph: EncoderGraph, softmax: ov.Node, kind: EncoderMask) -> None:
    scores = softmax.input_value(0)
    mask = _mask(graph, kind, scores.get_element_type())
    if len(scores.get_partial_shape()) == 4:
        softmax.input(0).replace_source_output(ops.add(scores, mask).output(0))
        return
    sizes = ops.shape_of(mask)
    pick = [ops.gather(sizes, ops.constant([index]), ops.constant(0)) for index in (0, 2, 3)]
    apart = ops.concat([pick[0], ops.constant(np.array([-1])), *pick[1:]], 0)
    masked = ops.add(ops.reshape(scores, apart, special_zero=False), mask)
    softmax.input(0).replace_source_output(ops.reshape(masked, ops.shape_of(scores), special_zero=False).output(0))

"""Finds the attentions of a model: ``ScaledDotProductAttention``, or written out as MatMul, Add, Softmax, MatMul."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import openvino as ov

from staticllm.ports import CROSS

from .step_graph import consumers, through

FUSED = "ScaledDotProductAttention"
KEY_PORT, VALUE_PORT, MASK_PORT = 1, 2, 3
_AROUND_SOFTMAX = frozenset({"Reshape", "Convert", "Maximum", "Minimum", "Clamp", "Squeeze", "Unsqueeze"})
_ON_SCORES = _AROUND_SOFTMAX | {"Multiply", "Divide", "Tanh"}
"""Scales, soft caps and shapes. Add is not among them, because a bias must not be taken for a part of the scores."""
_ON_KEYS = ("Reshape", "Transpose", "Convert", "Broadcast", "Tile", "Squeeze", "Unsqueeze")
"""What moves keys without changing their values."""
Role = Literal["key", "value"]
InputKey: TypeAlias = tuple[int, int]
"""Identifies an input of a node in dicts."""


@dataclass(frozen=True)
class Attention:
    """The attention of one layer."""

    node: ov.Node
    keys: ov.Input
    values: ov.Input
    mask: ov.Input | None
    """The port of the additive mask; None if there is none."""

    @property
    def is_cross(self) -> bool:
        """Whether it sees the frames of a window, whose keys and values ``lift_cross`` has made inputs, instead of tokens."""
        keys = through(self.keys.get_source_output(), *_ON_KEYS).get_node()
        return keys.get_type_name() == "Parameter" and bool(keys.get_friendly_name().startswith(CROSS))

    @property
    def scores(self) -> ov.Node:
        """The node whose shape is ``[1, heads, S, ...]``."""
        return self.node if self.node.get_type_name() == FUSED or self.mask is None else self.mask.get_node()


def find_attentions(model: ov.Model) -> list[Attention]:
    """Return the attentions of a model in the order of its layers."""
    found = (_attention(node) for node in model.get_ordered_ops())
    return [attention for attention in found if attention is not None]


def places_of(attentions: Iterable[Attention]) -> dict[InputKey, tuple[int, Role]]:
    """Return the number of an attention and the role of each of its inputs of keys and values."""
    places: dict[InputKey, tuple[int, Role]] = {}
    for layer, attention in enumerate(attentions):
        places[input_key(attention.keys)] = layer, "key"
        places[input_key(attention.values)] = layer, "value"
    return places


def place_of(rows: ov.Node, places: dict[InputKey, tuple[int, Role]]) -> tuple[int, Role] | None:
    """Return layer and role of keys or values by the attention that they reach, never by a name; None if they reach none."""
    queue = [rows]
    seen = {rows.get_instance_id()}
    while queue:
        node = queue.pop(0)
        for target in node.output(0).get_target_inputs():
            reader = target.get_node()
            if input_key(target) in places:
                return places[input_key(target)]
            if reader.get_type_name() not in ("ShapeOf", "Result") and reader.get_instance_id() not in seen:
                seen.add(reader.get_instance_id())
                queue.append(reader)
    return None


def input_key(port: ov.Input) -> InputKey:
    """Return what identifies an input of a node."""
    return port.get_node().get_instance_id(), port.get_index()


def _attention(node: ov.Node) -> Attention | None:
    if node.get_type_name() == FUSED:
        mask = node.input(MASK_PORT) if node.get_input_size() > MASK_PORT else None
        return Attention(node, node.input(KEY_PORT), node.input(VALUE_PORT), mask)
    return _written_out(node) if node.get_type_name() == "Softmax" else None


def _written_out(softmax: ov.Node) -> Attention | None:
    """Match Softmax(scores + mask) · values, where the scores are queries · keys; return None for any other Softmax."""
    add = through(softmax.input_value(0), *_AROUND_SOFTMAX).get_node()
    weighted = _reader(softmax.output(0))
    if add.get_type_name() != "Add" or weighted is None:
        return None
    for index in (0, 1):
        scores = through(add.input_value(index), *_ON_SCORES).get_node()
        if scores.get_type_name() == "MatMul":
            return Attention(softmax, scores.input(1), weighted.input(1), add.input(1 - index))
    return None


def _reader(output: ov.Output) -> ov.Node | None:
    """Return the MatMul whose left side this output is, if nothing else reads it."""
    readers = [node for node in consumers(output) if node.get_type_name() != "ShapeOf"]
    while len(readers) == 1 and readers[0].get_type_name() in _AROUND_SOFTMAX:
        output = readers[0].output(0)
        readers = [node for node in consumers(output) if node.get_type_name() != "ShapeOf"]
    is_product = len(readers) == 1 and readers[0].get_type_name() == "MatMul"
    return readers[0] if is_product and readers[0].input_value(0).get_node() == output.get_node() else None

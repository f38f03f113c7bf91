"""Makes the low-rank matrices of LoRA adapters inputs of the model, beside the matrices that they change.

A layer ``y = x · Wᵀ`` becomes ``y + ((x · aᵀ) * scales) · bᵀ``. The inputs ``a`` and ``b`` hold all adapters side by side, and
``adapter_scales [1, S, adapters]`` has one factor per row and adapter. So rows with different adapters share a call, another
alpha is another number in that input, and a row without adapters gets exactly 0 added. Layers that read the same values share one
``a`` and one ``b``, in which the matrices of each layer have their own rows and columns.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.adapters.lora import MAX_RANK
from staticllm.core import AdaptedGroup, AdaptedPart, AdapterLayout, AdapterType
from staticllm.errors import AdapterError, quoted
from staticllm.ports import ADAPTER_SCALES, LOGIT_ROWS

from ..graph.linear_layers import LinearLayer, find_linear_layers, layers_of_modules
from ..graph.step_graph import StepGraph
from .merge_projections import bias_add

STAGE = "expose_adapters"
_TYPES: dict[AdapterType, ov.Type] = {"f32": ov.Type.f32, "bf16": ov.Type.bf16}
LARGE_VALUES = 1 << 20
"""Values of a layer's part of ``b`` beyond which it does not share one: the zeros beside it would take longer than a product."""


@dataclass(frozen=True)
class Change:
    """What adapters change at one layer: ``(adapter, path, rank)`` of each."""

    layer: LinearLayer
    adapters: list[tuple[int, str, int]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """The sum of the ranks."""
        return sum(rank for _, _, rank in self.adapters)


def expose_adapters(graph: StepGraph, layouts: Sequence[AdapterLayout], adapter_type: AdapterType = "f32") -> None:
    """Add the inputs of these adapters, of this element type, and what they compute.

    Raises:
        AdapterError: an adapter has a path that is no linear layer of the model, other sizes than the layer, or the ranks of all
            adapters at one layer exceed ``MAX_RANK``.
    """
    changes = find_changes(graph.model, layouts)
    scales = graph.add_parameter(ADAPTER_SCALES, ov.PartialShape([1, -1, len(layouts)]), ov.Type.f32)
    graph.num_adapters = len(layouts)
    graph.adapter_type = adapter_type
    rows = _RowScales(graph, scales)
    for index, members in enumerate(_groups(changes)):
        _expose(graph, _group_of(index, members), members, rows)
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"{len(layouts)} adapters at {len(changes)} matrices, with {len(graph.adapted)} pairs of inputs")


def find_changes(model: ov.Model, layouts: Sequence[AdapterLayout]) -> list[Change]:
    """Return the layers that adapters change, in the order of the model.

    Raises:
        AdapterError: as for ``expose_adapters``.
    """
    layers = find_linear_layers(model)
    found = layers_of_modules(layers, {path for layout in layouts for path, *_ in layout})
    changes = {layer.node.get_instance_id(): Change(layer) for layer in layers}
    for adapter, layout in enumerate(layouts):
        for path, rank, in_size, out_size in layout:
            if not found[path]:
                raise AdapterError(
                    f"an adapter changes {quoted(path)}, which is no linear layer of this model{_beside(path, layers)}: "
                    "was it trained for another model?"
                )
            for layer in found[path]:
                if (layer.in_size, layer.out_size) != (in_size, out_size):
                    raise AdapterError(
                        f"an adapter maps {in_size} to {out_size} values at {quoted(path)}, the model has {layer.in_size} and "
                        f"{layer.out_size} there: it was trained for another model"
                    )
                changes[layer.node.get_instance_id()].adapters.append((adapter, path, rank))
    for change in changes.values():
        if change.rank > MAX_RANK:
            raise AdapterError(
                f"the adapters have rank {change.rank} together at {change.adapters[0][1]!r}, at most {MAX_RANK} are possible: "
                "load fewer adapters, or fold one in with MODE_FUSE"
            )
    return [change for change in changes.values() if change.adapters]


def _beside(path: str, layers: Sequence[LinearLayer]) -> str:
    """Return which linear layers a model has where an adapter has another one, in brackets; "" if it has none."""
    pattern = re.compile(rf"(?<![\w]){re.escape(path.rpartition('.')[0])}\.(\w+)")
    found = sorted({match[1] for layer in layers for name in layer.names[:1] if (match := pattern.search(name))})
    return f" (it has {', '.join(found)} there)" if found else ""


def _groups(changes: list[Change]) -> list[list[Change]]:
    """Return the changes of layers that read the same values together, unless they are large."""
    groups: dict[tuple[int, int, int], list[Change]] = defaultdict(list)
    for number, change in enumerate(changes):
        producer = change.layer.producer
        alone = number + 1 if change.layer.out_size * change.rank > LARGE_VALUES else 0
        groups[producer.get_node().get_instance_id(), producer.get_index(), alone].append(change)
    return list(groups.values())


def _group_of(index: int, members: list[Change]) -> AdaptedGroup:
    parts = list[AdaptedPart]()
    first_row = 0
    first_column = 0
    for change in members:
        for adapter, path, rank in change.adapters:
            parts.append(AdaptedPart(adapter, path, rank, first_row, first_column))
            first_column += rank
        first_row += change.layer.out_size
    return AdaptedGroup(index, members[0].layer.in_size, first_row, tuple(parts))


class _RowScales:
    """The factors of the rows of a call, for the columns of a group; groups with the same columns share them."""

    def __init__(self, graph: StepGraph, scales: ov.Node) -> None:
        self._scales = scales
        self._picks = graph.parameter(LOGIT_ROWS)
        self._is_paged = bool(graph.page_size)
        self._known: dict[tuple[tuple[int, ...], bool, bool, bool], ov.Node] = {}

    def of(self, group: AdaptedGroup, producer: ov.Output) -> ov.Node:
        """Return the factors for the rows of ``producer``, ``[1, rows, rank]``, or ``[rows, rank]`` like ``producer``."""
        is_picked = self._is_picked(producer)
        is_flat = len(producer.get_partial_shape()) == 2
        is_batch = self._is_paged and not is_picked and producer.get_partial_shape()[0].is_dynamic
        key = (group.columns, is_picked, is_flat, is_batch)
        if key not in self._known:
            found = self._scales
            if is_picked:  # the head reads only the rows that get logits
                found = ops.gather(found, self._picks, ops.constant(np.int64(1)))
            found = ops.gather(found, np.array(group.columns, np.int64), np.int64(2))
            if is_flat:
                found = ops.reshape(found, np.array([-1, group.rank]), special_zero=False)
            elif is_batch:  # its rows are a batch of sequences of one token
                found = ops.reshape(found, np.array([-1, 1, group.rank]), special_zero=False)
            self._known[key] = found
        return self._known[key]

    def _is_picked(self, producer: ov.Output) -> bool:
        node = producer.get_node()
        picks = self._picks
        if self._is_paged and node.get_type_name() == "Reshape":
            node = node.input_value(0).get_node()
        if picks is None or node.get_type_name() != "Gather":
            return False
        return bool(node.input_value(1).get_node().get_instance_id() == picks.get_instance_id())


def _expose(graph: StepGraph, group: AdaptedGroup, members: list[Change], rows: _RowScales) -> None:
    """Add the inputs of one group, and what they compute to the outputs of its layers."""
    producer = members[0].layer.producer
    rank = producer.get_partial_shape().rank
    if rank.is_dynamic or rank.get_length() not in (2, 3, 4):
        raise AdapterError(
            f"{members[0].adapters[0][1]!r} reads values of shape {producer.get_partial_shape()}: adapters are not possible there"
        )
    own_type = _TYPES[graph.adapter_type]
    a = graph.add_parameter(group.a_name, ov.PartialShape([group.rank, group.in_size]), own_type)
    b = graph.add_parameter(group.b_name, ov.PartialShape([group.out_size, group.rank]), own_type)
    low = ops.matmul(producer, ops.convert_like(a, producer), transpose_a=False, transpose_b=True)
    low = ops.multiply(low, ops.convert_like(rows.of(group, producer), producer))
    change = ops.matmul(low, ops.convert_like(b, producer), transpose_a=False, transpose_b=True)
    parts = [change.output(0)]
    if len(members) > 1:
        parts = ops.variadic_split(change, -1, np.array([member.layer.out_size for member in members])).outputs()
    for member, part in zip(members, parts, strict=True):
        changed = (
            bias_add(member.layer.node) or member.layer.node
        )  # after the bias, which plugins fuse with the product
        targets = changed.output(0).get_target_inputs()
        total = ops.add(changed, part)
        total.set_friendly_name(f"{changed.get_friendly_name()}/adapted")
        for target in targets:
            target.replace_source_output(total.output(0))
    graph.adapted.append(group)

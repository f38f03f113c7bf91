"""Computes a model's programs in f16 on a CPU that has no f16: every value that an NPU would hold is rounded.

OpenVINO's CPU plugin removes conversions to f16 and back, so the rounding is an operation of ours. What only depends on weights
is not rounded, nor what the host computes for all layers (angles, masks) before they read it. Sums of products are f32, as in
an NPU's matrix units. A norm is one operation there (docs/npu.md), so its squares and their mean are not rounded either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino as ov
from openvino import Op

from staticllm.core import Variant

from ...compiler_passes.blocks.dataflow import Dataflow
from ...compiler_passes.graph.control_values import key_of
from ...compiler_passes.graph.step_graph import consumers, through
from ...compiler_passes.lower import LoweredModel

LARGEST = float(np.finfo(np.float16).max)
_FLOATS = ("f32", "f16")
_SUMS = ("ReduceMean", "ReduceSum")
_OF_SUMS = ("Add", "Sqrt", "Power", "Divide", "Maximum", "Multiply", "Convert")
_LONGEST_NORM = 8
"""Most operations between the mean of squares and the product with it."""


@dataclass
class Extremes:
    """The largest finite number that a program has computed before it was rounded to f16, and where.

    Masks and masked scores are left out: they are far below zero on purpose.
    """

    largest: float = 0.0
    where: str = ""
    overflows: int = 0
    """The number of numbers that f16 cannot hold, or that such numbers have led to."""
    first: str = ""
    """The node that computed the first of them."""

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def see(self, values: np.ndarray[Any, Any], name: str) -> None:
        """Take note of what a node has computed."""
        sizes = np.abs(values)
        largest = float(sizes.max(initial=0))
        if not largest <= LARGEST:
            self.first = self.first or name
            self.overflows += int((~(sizes <= LARGEST)).sum())
            largest = float(sizes[np.isfinite(sizes)].max(initial=0))
        if largest > self.largest:
            self.largest = largest
            self.where = name


class RoundToF16(Op):  # type: ignore[misc]
    """Rounds numbers to those of f16. What is too large becomes infinite."""

    def __init__(self, inputs: list[ov.Output] | None = None, name: str = "", extremes: Extremes | None = None) -> None:
        super().__init__(self, inputs)
        self._name = name
        self._extremes = extremes

    def validate_and_infer_types(self) -> None:
        self.set_output_type(0, self.get_input_element_type(0), self.get_input_partial_shape(0))

    def clone_with_new_inputs(self, new_inputs: list[ov.Output]) -> RoundToF16:
        return RoundToF16(new_inputs, self._name, self._extremes)

    def has_evaluate(self) -> bool:
        return True

    def evaluate(  # pyright: ignore[reportIncompatibleMethodOverride] - OpenVINO calls it without a context
        self, outputs: list[ov.Tensor], inputs: list[ov.Tensor]
    ) -> bool:
        values = inputs[0].data
        if self._extremes is not None:
            self._extremes.see(values, self._name)
        with np.errstate(over="ignore", invalid="ignore"):
            outputs[0].data[...] = values.astype(np.float16)
        return True


def round_to_f16(model: ov.Model, extremes: Extremes | None = None, has_whole_norms: bool = True) -> int:
    """Round every number that an NPU would hold while it runs ``model``, which is changed; return how many nodes are rounded.

    Args:
        has_whole_norms: Whether norms are computed in one piece; else their squares are rounded, too.
    """
    flow = Dataflow.of(model)
    inside = {node.get_instance_id() for node in _inner_nodes(model)} if has_whole_norms else set()
    unseen = _masked_nodes(flow)
    count = 0
    for node in flow.nodes:
        if node.get_instance_id() in inside or node.get_type_name() in ("Constant", "Result"):
            continue
        for output in node.outputs():
            count += _round(flow, output, None if node.get_instance_id() in unseen else extremes)
    model.validate_nodes_and_infer_types()
    return count


def _round(flow: Dataflow, output: ov.Output, extremes: Extremes | None) -> bool:
    """Round what the nodes on the device read of an output, and return whether any does."""
    on_device = ("own", "tokens")
    readers = [port for port in output.get_target_inputs() if flow.dependence(port.get_node()) in on_device]
    is_computed = flow.dependence(output.get_node()) != "constant"
    if not readers or not is_computed or output.get_element_type().get_type_name() not in _FLOATS:
        return False
    rounded = RoundToF16([output], output.get_node().get_friendly_name(), extremes)
    for port in readers:
        port.replace_source_output(rounded.output(0))
    return True


def _masked_nodes(flow: Dataflow) -> set[int]:
    """Return the nodes that the host computes, such as masks, and the sums of scores and masks."""
    found = set[int]()
    for node in flow.nodes:
        kind = node.get_type_name()
        producers = [value.get_node().get_instance_id() for value in node.input_values()]
        readers = {reader.get_type_name() for output in node.outputs() for reader in consumers(output)}
        is_converted = kind == "ConvertLike" and producers[0] in found
        is_score = kind == "Add" and bool(readers & {"Softmax", "Concat"}) and any(each in found for each in producers)
        if flow.dependence(node) == "shared" or is_converted or is_score:
            found.add(node.get_instance_id())
    return found


def _inner_nodes(model: ov.Model) -> Iterator[ov.Node]:
    """Yield the nodes inside of norms: from the squares of a value to what the value is multiplied with."""
    for node in model.get_ordered_ops():
        if node.get_type_name() not in _SUMS:
            continue
        square = through(node.input_value(0), "Convert").get_node()
        if not _is_square(square):
            continue
        yield from (square, node)
        current = node
        for _ in range(_LONGEST_NORM):
            readers = consumers(current.output(0))
            if len(readers) != 1 or not _is_of_sum(readers[0], current):
                break
            current = readers[0]
            yield current


def _is_square(node: ov.Node) -> bool:
    kind = node.get_type_name()
    if kind == "Power":
        exponent = through(node.input_value(1), "Convert", "ConvertLike").get_node()
        return exponent.get_type_name() == "Constant" and bool(np.all(np.asarray(exponent.data) == 2))
    return kind == "Multiply" and key_of(node.input_value(0)) == key_of(node.input_value(1))


def _is_of_sum(node: ov.Node, producer: ov.Node) -> bool:
    """Return whether a node computes from ``producer`` and constants only."""
    others = [
        value for value in node.input_values() if value.get_node().get_instance_id() != producer.get_instance_id()
    ]
    kinds = {through(value, "Convert", "ConvertLike").get_node().get_type_name() for value in others}
    return node.get_type_name() in _OF_SUMS and kinds <= {"Constant"}


@dataclass(frozen=True)
class RoundedModel(LoweredModel):
    """A lowered model whose programs are computed in f16 by rounding."""

    extremes: Extremes = field(default_factory=Extremes)
    """What they have computed."""
    has_whole_norms: bool = True

    @classmethod
    def of(cls, lowered: LoweredModel, has_whole_norms: bool = True) -> RoundedModel:
        return cls(
            lowered.graph,
            lowered.shape,
            lowered.reports,
            lowered.variant_passes,
            has_whole_norms=has_whole_norms,
        )

    def specialise(self, variant: Variant, is_static: bool = True) -> ov.Model:
        model = super().specialise(variant, is_static)
        round_to_f16(model, self.extremes, self.has_whole_norms)
        return model

    def share(self, variants: tuple[Variant, ...]) -> ov.Model:
        model = super().share(variants)
        round_to_f16(model, self.extremes, self.has_whole_norms)
        return model

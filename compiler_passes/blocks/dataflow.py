"""Tells where each value of a static program comes from, and finds the values through which everything after them passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.devices import get_core
from staticllm.ports import CROSS, INPUT_FEATURES, INPUT_IDS, PAST, PRESENT, TOKEN_TYPE_IDS

from ..graph.step_graph import part_of, redirect, upstream

Dependence = Literal["constant", "shared", "own", "tokens"]
"""``constant``: of constants; ``shared``: of inputs that all layers read (positions, masks); ``own``: of inputs that one layer
reads (keys, values, states, adapters); ``tokens``: of the tokens, or of the features of a window."""
_OWN = (PAST, CROSS, "state.", "adapter.")
_STATES = (PRESENT, "state.")
_TOKENS = frozenset({INPUT_IDS, TOKEN_TYPE_IDS, INPUT_FEATURES})
MOST_FOLDED = 1 << 14
"""The most numbers of a constant of which shapes, positions and the like are computed; more are weights."""
_ORDER: tuple[Dependence, ...] = ("constant", "shared", "own", "tokens")


def port_name(node: ov.Node) -> str:
    """Return the name of a parameter's or result's port."""
    names: set[str] = node.output(0).get_names()
    return min(names) if names else node.get_friendly_name()


def is_state(result: ov.Node) -> bool:
    """Return whether a result is new keys, values or a state of some layer."""
    return port_name(result).startswith(_STATES)


def fold_shapes(model: ov.Model) -> None:
    """Replace whatever a static program computes from shapes by constants."""
    found = _shape_values(model)
    if not found:
        return
    part = part_of(found, _parameters_of(found))
    program = get_core().compile_model(part, "CPU")
    feeds = [np.zeros(list(port.get_shape()), port.get_element_type().to_dtype()) for port in program.inputs]
    values = [np.array(value) for value in program(feeds).values()]
    for output, value in zip(found, values, strict=True):
        redirect(output, ops.constant(value, output.get_element_type()).output(0))
    model.validate_nodes_and_infer_types()


def _shape_values(model: ov.Model) -> list[ov.Output]:
    """Return the outputs that depend on ``ShapeOf`` and constants only, and that something else reads."""
    kinds = dict[int, str]()
    nodes = model.get_ordered_ops()
    for node in nodes:
        kind = node.get_type_name()
        producers = {kinds[value.get_node().get_instance_id()] for value in node.input_values()}
        if kind in ("ShapeOf", "Constant", "Parameter"):
            kinds[node.get_instance_id()] = kind
        else:
            kinds[node.get_instance_id()] = next(
                (each for each in ("other", "Parameter", "ShapeOf") if each in producers), "Constant"
            )
        is_computed = kinds[node.get_instance_id()] == "Parameter" and kind != "Parameter"
        if is_computed or (kinds[node.get_instance_id()] == "ShapeOf" and _reads_weights(node, kinds)):
            kinds[node.get_instance_id()] = "other"
    return [
        output
        for node in nodes
        if kinds[node.get_instance_id()] == "ShapeOf"
        for output in node.outputs()
        if any(
            kinds[target.get_node().get_instance_id()] not in ("ShapeOf", "Constant")
            for target in output.get_target_inputs()
        )
    ]


def _reads_weights(node: ov.Node, kinds: dict[int, str]) -> bool:
    """Return whether a node, such as a Reshape, gives weights a shape: that is to be folded, and not the weights."""
    constants = [value for value in node.input_values() if kinds[value.get_node().get_instance_id()] == "Constant"]
    return any(math.prod(value.get_shape()) > MOST_FOLDED for value in constants)


def _parameters_of(outputs: Sequence[ov.Output]) -> list[ov.Node]:
    return [node for node in upstream(output.get_node() for output in outputs) if node.get_type_name() == "Parameter"]


@dataclass(frozen=True)
class Dataflow:
    """A static program, its nodes in their order, and the dependence of each by its instance."""

    model: ov.Model
    nodes: tuple[ov.Node, ...]
    dependences: dict[int, Dependence]

    @classmethod
    def of(cls, model: ov.Model) -> Dataflow:
        """Return the data flow of a model, whose shapes are static and folded."""
        nodes = tuple(model.get_ordered_ops())
        dependences = dict[int, Dependence]()
        for node in nodes:
            dependences[node.get_instance_id()] = _dependence(node, dependences)
        return cls(model, nodes, dependences)

    def dependence(self, node: ov.Node) -> Dependence:
        """Return where a node's values come from."""
        return self.dependences[node.get_instance_id()]

    @cached_property
    def finals(self) -> tuple[ov.Node, ...]:
        """The results that are neither keys, values nor states."""
        return tuple(result for result in self.model.get_results() if not is_state(result))

    @cached_property
    def chain(self) -> tuple[ov.Node, ...]:
        """The nodes on the way from the tokens to the final results, in their order."""
        needed = {node.get_instance_id() for node in upstream(self.finals)}
        return tuple(
            node for node in self.nodes if self.dependence(node) == "tokens" and node.get_instance_id() in needed
        )

    @cached_property
    def places(self) -> dict[int, int]:
        """Place in the chain by instance."""
        return {node.get_instance_id(): place for place, node in enumerate(self.chain)}

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The places before the first result of the chain, after which no value from before them is read, except their own."""
        found = list[int]()
        last_read = -1
        for place, node in enumerate(self.chain):
            if node.get_type_name() == "Result":
                break
            if last_read <= place and len(node.outputs()) == 1 and node.get_type_name() != "Parameter":
                found.append(place)
            last_read = max(last_read, self._last_reader(node))
        return tuple(found)

    def _last_reader(self, node: ov.Node) -> int:
        readers = (target.get_node() for output in node.outputs() for target in output.get_target_inputs())
        return max((self.places.get(reader.get_instance_id(), -1) for reader in readers), default=-1)

    @cached_property
    def depths(self) -> dict[int, int]:
        """For each node that depends on tokens, the place of the last node of the chain that it depends on, or its own."""
        found = dict[int, int]()
        for node in self.nodes:
            key = node.get_instance_id()
            if self.dependence(node) == "tokens":
                before = [found.get(value.get_node().get_instance_id(), -1) for value in node.input_values()]
                found[key] = self.places.get(key, max(before, default=-1))
        return found


def _dependence(node: ov.Node, known: dict[int, Dependence]) -> Dependence:
    kind = node.get_type_name()
    if kind == "Constant":
        return "constant"
    if kind == "Parameter":
        name = port_name(node)
        if name in _TOKENS:
            return "tokens"
        if name.startswith(_OWN):
            return "own"
        return "shared"
    producers = {known[value.get_node().get_instance_id()] for value in node.input_values()}
    for dependence in reversed(_ORDER):
        if dependence in producers:
            return dependence
    return "constant"


def num_bytes(output: ov.Output) -> int:
    """Return the bytes of a static output."""
    return int(math.prod(output.get_shape()) * output.get_element_type().bitwidth // 8)

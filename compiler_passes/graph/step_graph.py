"""The graph that the passes change, and the graph operations that several passes need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from staticllm.core import AdaptedGroup, AdapterType, KVState, MaskKind, RecurrentState
from staticllm.devices import get_core
from staticllm.ports import Port, Sizes

_COMPRESSED = ("u8", "i8", "u4", "i4")
_DECOMPRESSION = ("Convert", "Multiply", "Subtract", "Reshape")


@dataclass
class LiftedState:
    """One ReadValue/Assign pair after lifting: ``past`` is an input, ``present`` an output."""

    variable_id: str
    past: ov.Node
    present: ov.Node
    initial: ov.Output | None  # the initial value of the ReadValue; None means zeros


@dataclass
class StepGraph:
    """A model on its way from stateful IR to step program. Passes change it in place."""

    model: ov.Model
    states: list[LiftedState] = field(default_factory=list)
    kv_states: list[KVState] = field(default_factory=list)
    recurrent_states: list[RecurrentState] = field(default_factory=list)
    cross_states: list[KVState] = field(default_factory=list)
    cross_model: ov.Model | None = None  # computes the keys and values of cross-attention of one window
    cross_window_len: int = 0  # frames of one window
    num_cross_windows: int = 0  # windows whose keys and values a program sees
    masks: list[MaskKind] = field(default_factory=list)
    layer_masks: list[str] = field(default_factory=list)  # label of each layer's mask
    query_heads: list[int] = field(default_factory=list)  # number in each layer, before they are grouped
    is_packable: bool = True  # whether several sequences can share a call
    rope_limits: tuple[int, ...] = ()  # lengths of a sequence after which its RoPE factors change
    max_rows: int | None = None  # most rows that a call can process; None without a limit
    num_adapters: int = 0  # adapters that a row can have
    adapted: list[AdaptedGroup] = field(default_factory=list)  # matrices that they change
    adapter_type: AdapterType = "f32"
    page_size: int = 0  # slots of a page, if the attention reads and writes pages
    blocks: dict[int, ov.Node] = field(default_factory=dict)  # address of joined constants → constant of all of them
    notes: dict[str, list[str]] = field(default_factory=dict)
    """For each pass, what it matched and what it left alone; ``staticllm inspect`` prints them."""

    def note(self, stage: str, text: str) -> None:
        """Add a line to the notes of one pass."""
        self.notes.setdefault(stage, []).append(text)

    @property
    def ports(self) -> list[KVState | RecurrentState]:
        """Every state, of keys and values or recurrent, that has a past and a present port."""
        return [*self.kv_states, *self.recurrent_states]

    def attentions(self) -> list[ov.Node]:
        """The attention nodes, in the order of their layers."""
        return [node for node in self.model.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]

    def parameter(self, name: str) -> ov.Node | None:
        """Return the parameter whose port has this name, or None."""
        for node in self.model.get_parameters():
            if name in node.output(0).get_names():
                return node
        return None

    def add_parameter(self, name: str, shape: ov.PartialShape, element_type: ov.Type) -> ov.Node:
        """Add an input of this name to the model, and return its parameter."""
        node = named_parameter(name, shape, element_type)
        self.model.add_parameters([node])
        return node


def named_parameter(name: str, shape: ov.PartialShape, element_type: ov.Type) -> ov.Node:
    """Make a parameter whose node and port have this name; it is not yet part of a model."""
    node = ops.parameter(shape, element_type)
    name_port(node, name)
    return node


def named_result(name: str, value: ov.Output) -> ov.Node:
    """Make a result whose node and port have this name; it is not yet part of a model."""
    node = ops.result(value)
    name_port(node, name)
    return node


def name_port(node: ov.Node, name: str) -> None:
    """Give a parameter or result, and its port, this name."""
    node.set_friendly_name(name)
    node.output(0).set_names({name})


def part_of(outputs: Iterable[ov.Output], parameters: Sequence[ov.Node]) -> ov.Model:
    """Return a model that computes these outputs of a graph from its ``parameters``; it shares their nodes."""
    results = [ops.result(output) for output in outputs]
    return ov.Model(results, list(parameters))  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs


_PLAIN = ("f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "boolean")
"""The types that are computed as they are. What has others is compiled, because a plugin computes it in f32."""


def evaluated(part: ov.Model, feeds: Sequence[NDArray[np.generic]] = ()) -> list[NDArray[Any]]:
    """Return the outputs of a small part of a graph in f32, without compiling it if that is possible."""
    found = _folded(part, feeds)
    if found is not None:
        return found
    program = get_core().compile_model(part, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return [value.copy() for value in program(list(feeds)).values()]


def _folded(part: ov.Model, feeds: Sequence[NDArray[np.generic]]) -> list[NDArray[Any]] | None:
    """Evaluate a part as constants are folded, which is much faster than compiling it; None if it cannot be done.

    A part with sizes that are not known is not evaluated so: the library corrupts memory then.
    """
    nodes = part.get_ordered_ops()
    for node in nodes:
        if node.get_type_name() == "Constant":
            continue
        for output in node.outputs():
            if output.get_element_type().get_type_name() not in _PLAIN or output.get_partial_shape().is_dynamic:
                return None
    found = [ov.Tensor(output.get_element_type(), output.get_shape()) for output in part.outputs]
    with suppress(RuntimeError):  # an operation that cannot be folded
        if part.evaluate(found, [ov.Tensor(np.ascontiguousarray(feed)) for feed in feeds]):
            return [tensor.data.copy() for tensor in found]
    return None


def sized(shape: ov.PartialShape, contract: Port, sizes: Sizes) -> ov.PartialShape:
    """Return ``shape``, which is changed in place, with the sizes of calls in the axes that the port's contract names."""
    for axis, bounds in contract.ranges(len(shape), sizes).items():
        shape[axis] = ov.Dimension(*bounds)
    return shape


def redirect(old: ov.Output, new: ov.Output) -> None:
    """Let every consumer of ``old`` read ``new``."""
    for target in old.get_target_inputs():
        target.replace_source_output(new)


def consumers(output: ov.Output) -> list[ov.Node]:
    """Return the nodes that read an output, once per input that reads it."""
    return [target.get_node() for target in output.get_target_inputs()]


def through(output: ov.Output, *type_names: str) -> ov.Output:
    """Return the first output upstream that none of these ops with one data input (``Convert`` and the like) produces."""
    while output.get_node().get_type_name() in type_names:
        output = output.get_node().input_value(0)
    return output


def upstream(roots: Iterable[ov.Node]) -> Iterator[ov.Node]:
    """Yield every node that ``roots`` depend on, including ``roots``, once each."""
    stack = list(roots)
    seen = set()
    while stack:
        node = stack.pop()
        key = node.get_instance_id()
        if key in seen:
            continue
        seen.add(key)
        yield node
        stack.extend(value.get_node() for value in node.input_values())


def is_zero(output: ov.Output) -> bool:
    """Return whether a value is a constant 0, possibly broadcast or converted."""
    node = through(output, "Broadcast", "Convert", "Reshape", "Tile").get_node()
    return node.get_type_name() == "Constant" and not np.any(node.data)


def is_live(model: ov.Model, parameter: ov.Node) -> bool:
    """Return whether any result depends on this parameter."""
    key = parameter.get_instance_id()
    roots = [*model.get_results(), *model.get_sinks()]
    return any(node.get_instance_id() == key for node in upstream(roots))


def compressed_weights(node: ov.Node) -> ov.Node | None:
    """Return the integer constant that a MatMul decompresses and multiplies with; None if there is none."""
    if node.get_type_name() != "MatMul" or len(node.input_value(1).get_partial_shape()) != 2:
        return None
    weights = through(node.input_value(1), *_DECOMPRESSION).get_node()
    is_constant = weights.get_type_name() == "Constant"
    return weights if is_constant and weights.get_element_type().get_type_name() in _COMPRESSED else None

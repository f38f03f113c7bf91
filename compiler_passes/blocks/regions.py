"""Regions of a program between two cuts, described so that equal descriptions mean equal computations."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import openvino as ov

from ..graph.control_values import Key, key_of
from .dataflow import Dataflow, num_bytes

SMALL_SIZE = 64
"""Most numbers of a constant that stays in a part if all calls of the part agree on it."""
SHARED_BYTES, SHARED_SHARE = 4 << 20, 8
"""A value that layers share becomes an input unless it has more bytes than this, and than this many times its own inputs."""
Role = Literal["hidden", "small", "weights", "port", "shared"]
_WHOLE = frozenset({"i64", "i32", "u64", "u32", "boolean"})
"""Types of constants that are axes, sizes and indices."""
_LOOPS = frozenset({"Loop", "TensorIterator"})


@dataclass(frozen=True)
class Entry:
    """A value that enters a region."""

    role: Role
    output: ov.Output


@dataclass(frozen=True)
class Region:
    """The nodes between two cuts."""

    begin: int
    end: int
    signature: int
    """Equal for two regions that compute the same from their ``entries``, whose order is the same then."""
    entries: tuple[Entry, ...]
    outputs: tuple[ov.Output, ...]
    """What it hands on, then its states."""
    states: tuple[ov.Node, ...]
    is_last: bool


@dataclass
class Regions:
    """Describes regions of one program. Equal descriptions get the same number."""

    flow: Dataflow
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _attributes: dict[int, Hashable] = field(default_factory=dict)

    def describe(self, begin: int | None, end: int | None) -> Region:
        """Return the region after the cut at place ``begin`` up to the one at ``end`` of the chain.

        None: from the tokens on, or up to the final results.
        """
        chain = self.flow.chain
        first = -1 if begin is None else begin
        last = len(chain) - 1 if end is None else end
        hidden = None if begin is None else chain[begin]
        states = self._ordered(self._states(first, last, end is None), hidden, first)
        finals = [result.input_value(0) for result in self.flow.finals] if end is None else [chain[last].output(0)]
        outputs = (*finals, *(state.input_value(0) for state in states))
        walk = _Walk(self, hidden, first)
        numbers = tuple(walk.number(output) for output in outputs)
        return Region(first, last, self.intern(("region", numbers)), tuple(walk.entries), outputs, states, end is None)

    def _states(self, first: int, last: int, is_end: bool) -> list[ov.Node]:
        """Return the results of states that a region computes."""
        finals = {result.get_instance_id() for result in self.flow.finals}
        found = []
        for result in self.flow.model.get_results():
            depth = self.flow.depths.get(result.get_instance_id(), -1)
            is_inside = first < depth <= last or (is_end and depth < 0)
            if is_inside and result.get_instance_id() not in finals:
                found.append(result)
        return found

    def _ordered(self, states: Sequence[ov.Node], hidden: ov.Node | None, first: int) -> tuple[ov.Node, ...]:
        """Return the states of a region in an order that is the same in all layers of a kind: by what computes them.

        An export may number the states of its layers in different orders. States that are computed alike follow their names.
        """

        def key(state: ov.Node) -> tuple[int, list[Any]]:
            return _Walk(self, hidden, first).number(state.input_value(0)), _natural(state)

        return tuple(sorted(states, key=key))

    def intern(self, description: Hashable) -> int:
        """Return the number of a description."""
        return self._numbers.setdefault(description, len(self._numbers))

    def attributes(self, node: ov.Node) -> Hashable:
        """Return what distinguishes a node from others of its type, other than what it reads."""
        key = node.get_instance_id()
        if key not in self._attributes:
            body = describe_body(node)
            self._attributes[key] = key if body is None else (describe_attributes(node), body)
        return self._attributes[key]

    def is_entry(self, output: ov.Output) -> bool:
        """Return whether a value that layers share is computed once, for all of them."""
        size = num_bytes(output)
        return size <= SHARED_BYTES or size <= SHARED_SHARE * sum(map(num_bytes, _inputs_of(output)))


@dataclass
class _Walk:
    """One walk through a region, from its outputs back to what enters it."""

    regions: Regions
    hidden: ov.Node | None
    first: int
    entries: list[Entry] = field(default_factory=list)
    _known: dict[Key, int] = field(default_factory=dict)

    def number(self, output: ov.Output) -> int:
        """Return the number of what ``output`` computes from the entries, which are collected in the order of the walk."""
        stack = [output]
        while stack:
            current = stack[-1]
            key = key_of(current)
            if key in self._known:
                stack.pop()
                continue
            entry = self._entry(current)
            if entry is not None:
                self._known[key] = entry
                stack.pop()
                continue
            producers = current.get_node().input_values()
            missing = [producer for producer in producers if key_of(producer) not in self._known]
            if missing:
                stack.extend(reversed(missing))
                continue
            self._known[key] = self._computed(current, producers)
            stack.pop()
        return self._known[key_of(output)]

    def _computed(self, output: ov.Output, producers: Sequence[ov.Output]) -> int:
        node = output.get_node()
        read = tuple(self._known[key_of(producer)] for producer in producers)
        attributes = self.regions.attributes(node)
        return self.regions.intern((node.get_type_name(), output.get_index(), _type_of(output), attributes, read))

    def _entry(self, output: ov.Output) -> int | None:
        """Return the number of a value that enters the region, or of an axis or size; None if it is computed inside."""
        node = output.get_node()
        if node.get_type_name() == "Constant":
            value = axis_value(node)
            if value is not None:
                return self.regions.intern(("value", _type_of(output), value))
            return self._add("small" if _is_small(output) else "weights", output)
        if self.hidden is not None and node.get_instance_id() == self.hidden.get_instance_id():
            return self._add("hidden", output)
        if node.get_type_name() == "Parameter":
            return self._add("port", output)
        flow = self.regions.flow
        is_shared = self.hidden is not None and flow.dependence(node) == "shared" and not _is_widened(node)
        if is_shared and self.regions.is_entry(output):
            return self._add("shared", output)
        place = flow.places.get(node.get_instance_id())
        assert place is None or place > self.first, f"{node.get_friendly_name()} is before its region"
        return None

    def _add(self, role: Role, output: ov.Output) -> int:
        self.entries.append(Entry(role, output))
        return self.regions.intern(("entry", role, _type_of(output), len(self.entries)))


def _is_widened(node: ov.Node) -> bool:
    """Return whether a node only converts to more bytes: the narrow value is the entry, of which the device reads less."""
    if node.get_type_name() != "Convert":
        return False
    return int(node.get_input_element_type(0).bitwidth) < int(node.get_output_element_type(0).bitwidth)


def axis_value(constant: ov.Node) -> Hashable | None:
    """Return the value of a constant that is an axis, a size or an index; None for other constants."""
    output = constant.output(0)
    if output.get_element_type().get_type_name() not in _WHOLE or not _is_small(output):
        return None
    return np.asarray(constant.data).tobytes()


def _is_small(output: ov.Output) -> bool:
    return int(math.prod(output.get_shape())) <= SMALL_SIZE


def _type_of(output: ov.Output) -> Hashable:
    return output.get_element_type().get_type_name(), tuple(output.get_shape())


def _inputs_of(output: ov.Output) -> Iterator[ov.Output]:
    """Yield the parameters that an output depends on."""
    stack = [output.get_node()]
    seen = set[int]()
    while stack:
        node = stack.pop()
        if node.get_instance_id() in seen:
            continue
        seen.add(node.get_instance_id())
        if node.get_type_name() == "Parameter":
            yield node.output(0)
        stack.extend(value.get_node() for value in node.input_values())


def _natural(result: ov.Node) -> list[Any]:
    """Return a key that sorts names by their text, and the numbers in them as numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", min(result.output(0).get_names()))]


def describe_body(node: ov.Node) -> Hashable | None:
    """Return a description of what is inside a node: empty if it has no body, None if its body cannot be compared."""
    kind = node.get_type_name()
    if kind == "If":
        return None
    if kind not in _LOOPS:
        return ()
    loop: Any = node
    ports = tuple(loop.get_special_body_ports()) if kind == "Loop" else ()
    described = (*loop.get_input_descriptions(), *loop.get_output_descriptions())
    nodes = _describe_nodes(loop.get_function())
    return None if nodes is None else (ports, tuple(map(_fields, described)), nodes)


def _describe_nodes(body: ov.Model) -> Hashable | None:
    """Return what each node of a body is and reads, and the values of its constants."""
    nodes = body.get_ordered_ops()
    places = {node.get_instance_id(): place for place, node in enumerate(nodes)}
    found = list[Hashable]()
    for node in nodes:
        inner = describe_body(node)
        if inner is None:
            return None
        reads = tuple((places[value.get_node().get_instance_id()], value.get_index()) for value in node.input_values())
        types = tuple((str(out.get_element_type()), str(out.get_partial_shape())) for out in node.outputs())
        is_constant = node.get_type_name() == "Constant"
        value = np.asarray(node.data).tobytes() if is_constant else describe_attributes(node)
        found.append((node.get_type_name(), reads, types, value, inner))
    order = [places[node.get_instance_id()] for node in (*body.get_parameters(), *body.get_results())]
    return tuple(order), tuple(found)


def describe_attributes(node: ov.Node) -> Hashable:
    return str(sorted((name, str(value)) for name, value in node.get_attributes().items()))


def _fields(description: Any) -> Hashable:
    names = [name for name in dir(description) if not name.startswith("_")]
    return type(description).__name__, tuple((name, str(getattr(description, name))) for name in names)

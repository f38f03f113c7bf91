"""Splits a static program into a chain: a part for the host, parts that repeat, and the rest."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.errors import UnsupportedModelError

from ..graph.control_values import Key, key_of
from ..graph.step_graph import named_parameter, named_result, redirect, upstream
from .chain_model import (
    BlockInput,
    BlockOutput,
    ChainCall,
    ChainModel,
    ChainPart,
    ChainPort,
    OfPort,
    OfRows,
    OfWeights,
    OfWire,
    OfWireRows,
    WireType,
)
from .dataflow import Dataflow, fold_shapes, num_bytes, port_name
from .drop_idle import drop_idle
from .pick_early import find_pick, pick_early
from .pick_rows import pick_rows
from .regions import Entry, Region, Regions

_HEAVY = frozenset({"MatMul", "Convolution", "GroupConvolution", "ScaledDotProductAttention"})
_NUMBERED = re.compile(r"[A-Za-z]+_\d+")
INLINE_BYTES = 1 << 16
"""Constants of the host's part that have fewer bytes stay in it."""
Group = tuple[int, ...]
"""Signatures of consecutive segments."""


class Splitter:
    """Splits the programs of one model. Parts that several programs have in common have the same key."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def split(self, model: ov.Model) -> ChainModel:
        """Split a static program, which is changed. Without layers that repeat, one part is all of it but the host's.

        Raises:
            UnsupportedModelError: no value of the program depends on the tokens alone.
        """
        fold_shapes(model)
        drop_idle(model)
        pick_early(model)
        flow = Dataflow.of(model)
        regions = Regions(flow, self._numbers)
        host_cut, bounds = _boundaries(flow, regions)
        found = [regions.describe(begin, end) for begin, end in bounds]
        builder = _Builder(flow)
        builder.add_host(regions.describe(None, host_cut), _shared_values(found))
        builder.add_regions(found)
        inputs = tuple(_port(parameter) for parameter in model.get_parameters())
        outputs = tuple(_port(result) for result in model.get_results())
        return ChainModel(tuple(builder.parts), tuple(builder.calls), tuple(builder.wires), inputs, outputs)


def _port(node: ov.Node) -> ChainPort:
    return ChainPort(port_name(node), tuple(node.get_output_shape(0)), node.get_output_element_type(0))


def _boundaries(flow: Dataflow, regions: Regions) -> tuple[int, list[tuple[int, int | None]]]:
    """Return the cut after the host's part, and the begins and ends of the other regions; None is the end of the chain."""
    places = enumerate(flow.chain)
    first_heavy = next((place for place, node in places if node.get_type_name() in _HEAVY), len(flow.chain))
    host_cut = max((cut for cut in flow.cuts if cut < first_heavy), default=None)
    if host_cut is None:
        raise UnsupportedModelError("split", "no value depends on the tokens alone: nothing can be done on the host")
    cuts = [cut for cut in flow.cuts if cut == host_cut or host_cut < cut < _last_computed(flow)]
    pick = _pick_place(flow)
    if pick not in cuts:
        return host_cut, _grouped(regions, [*cuts, None])
    after = cuts.index(pick)
    return host_cut, [*_grouped(regions, cuts[:after]), (pick, None)]


def _last_computed(flow: Dataflow) -> int:
    """Return the place of the last node of the chain that is no result: a cut after it would leave an empty region."""
    return max(place for place, node in enumerate(flow.chain) if node.get_type_name() != "Result")


def _pick_place(flow: Dataflow) -> int:
    """Return the place of the node that picks rows for logits, if the host can do that: the whole rest reads it; else -1."""
    pick = find_pick(flow.model)
    return -1 if pick is None else flow.places.get(pick.get_instance_id(), -1)


def _grouped(regions: Regions, cuts: Sequence[int | None]) -> list[tuple[int, int | None]]:
    """Return the begins and ends of regions from the first of these cuts to the last."""
    segments = [regions.describe(begin, end) for begin, end in pairwise(cuts)]
    bounds = list[tuple[int, int | None]]()
    first = 0
    for group in group_segments([segment.signature for segment in segments]):
        last = first + len(group)
        begin = cuts[first]
        assert begin is not None, "only the end of the chain is None"
        bounds.append((begin, cuts[last]))
        first = last
    return bounds


def _shared_values(regions: Iterable[Region]) -> list[ov.Output]:
    """Return each value that layers share once."""
    entries = (entry for region in regions for entry in region.entries)
    return list({key_of(entry.output): entry.output for entry in entries if entry.role == "shared"}.values())


@dataclass
class _Builder:
    """Collects parts, calls and wires."""

    flow: Dataflow
    parts: list[ChainPart] = field(default_factory=list)
    calls: list[ChainCall] = field(default_factory=list)
    wires: list[WireType] = field(default_factory=list)
    _wire_of: dict[Key, OfWire] = field(default_factory=dict)

    def add_host(self, region: Region, shared: Sequence[ov.Output]) -> None:
        """Add the host's part: embeddings, what is computed from positions and masks, everything that layers share."""
        outputs = [*region.outputs[:1], *shared]
        states = region.states
        copy = _Copy(self.flow)
        results = [copy.output(value) for value in (*outputs, *region.outputs[1:])]
        inputs = copy.host_inputs(results)
        targets: list[BlockOutput] = [*map(self._new_wire, outputs), *(OfPort(port_name(state)) for state in states)]
        model = _model(copy.results(results), [node for node, _ in inputs], "host")
        self.parts.append(ChainPart("host", "host", model, object()))
        self.calls.append(ChainCall(0, tuple(read for _, read in inputs), tuple(targets)))

    def add_regions(self, regions: Sequence[Region]) -> None:
        """Add one part for all regions of the same signature, and a call for each region."""
        groups = dict[int, list[Region]]()
        for region in regions:
            groups.setdefault(region.signature, []).append(region)
        inputs = {signature: _differing(group) for signature, group in groups.items()}
        numbers = dict[int, int]()
        for region in regions:
            entries = [region.entries[index] for index in inputs[region.signature]]
            if region.signature not in numbers:
                numbers[region.signature] = len(self.parts)
                self.parts.append(self._part(region, entries, len(groups[region.signature])))
            reads = tuple(map(self._input, entries))
            self.calls.append(ChainCall(numbers[region.signature], reads, self._outputs(region)))

    def _part(self, region: Region, entries: Sequence[Entry], count: int) -> ChainPart:
        name = f"{'block' if count > 1 else 'part'}{len(self.parts)}"
        copy = _Copy(self.flow)
        inputs = [copy.input(entry, index) for index, entry in enumerate(entries)]
        results = copy.results([copy.output(value) for value in region.outputs])
        inlined = tuple(
            (place, _bytes_of(each.output.get_node()))
            for place, each in enumerate(region.entries)
            if each not in entries
        )
        return ChainPart(name, "device", _model(results, inputs, name), (region.signature, inlined))

    def _outputs(self, region: Region) -> tuple[BlockOutput, ...]:
        states = [OfPort(port_name(state)) for state in region.states]
        num_handed_on = len(region.outputs) - len(states)
        if region.is_last:
            return (*(OfPort(port_name(result)) for result in self.flow.finals), *states)
        return (*map(self._new_wire, region.outputs[:num_handed_on]), *states)

    def _input(self, entry: Entry) -> BlockInput:
        if entry.role == "port":
            return OfPort(port_name(entry.output.get_node()))
        if entry.role in ("weights", "small"):
            return OfWeights(entry.output.get_node())
        pick = entry.output.get_node()
        if key_of(entry.output) not in self._wire_of:  # the rows that get logits, of what the last layer computes
            values, rows = pick.input_values()[:2]
            return OfWireRows(self._wire_of[key_of(values)].number, port_name(rows.get_node()))
        return self._wire_of[key_of(entry.output)]

    def _new_wire(self, output: ov.Output) -> OfWire:
        wire = OfWire(len(self.wires))
        self._wire_of[key_of(output)] = wire
        self.wires.append(WireType(tuple(output.get_shape()), output.get_element_type()))
        return wire


def _differing(regions: Sequence[Region]) -> list[int]:
    """Return the entries that are inputs: all but the small constants that are equal in all of these regions."""

    def is_input(index: int) -> bool:
        entries = [region.entries[index] for region in regions]
        if entries[0].role != "small":
            return True
        values = [_bytes_of(entry.output.get_node()) for entry in entries]
        return any(value != values[0] for value in values)

    return [index for index in range(len(regions[0].entries)) if is_input(index)]


class _Copy:
    """A copy of the program, out of which one part is cut."""

    def __init__(self, flow: Dataflow) -> None:
        self._model = flow.model.clone()
        self._nodes: Sequence[ov.Node] = self._model.get_ordered_ops()
        self._places: Mapping[int, int] = {node.get_instance_id(): place for place, node in enumerate(flow.nodes)}
        self._replaced: dict[Key, ov.Output] = {}

    def output(self, output: ov.Output) -> ov.Output:
        """Return what takes the place of an output of the program."""
        found = self._replaced.get(key_of(output))
        return found or self._nodes[self._places[output.get_node().get_instance_id()]].output(output.get_index())

    def input(self, entry: Entry, index: int) -> ov.Node:
        """Let an input take the place of what enters a region, and return it."""
        old = self.output(entry.output)
        parameter = named_parameter(f"in{index}.{entry.role}", old.get_partial_shape(), old.get_element_type())
        redirect(old, parameter.output(0))
        self._replaced[key_of(entry.output)] = parameter.output(0)
        return parameter

    def host_inputs(self, results: list[ov.Output]) -> list[tuple[ov.Node, BlockInput]]:
        """Return the inputs of the host's part, which computes ``results``, and what they read; lookups become inputs."""
        found = list[tuple[ov.Node, BlockInput]]()
        ends = [ops.result(value) for value in results]
        needed = {node.get_instance_id() for node in upstream(ends)}
        for picked in pick_rows([node for node in self._nodes if node.get_instance_id() in needed]):
            found.append((picked.parameter, OfRows(picked.table, picked.port)))
        results[:] = [end.input_value(0) for end in ends]
        known = {parameter.get_instance_id() for parameter, _ in found}
        for node in sorted(upstream(ends), key=lambda node: node.get_friendly_name()):
            if node.get_type_name() == "Parameter" and node.get_instance_id() not in known:
                found.append((node, OfPort(port_name(node))))
            elif node.get_type_name() == "Constant" and num_bytes(node.output(0)) >= INLINE_BYTES:
                found.append((self._weights_input(node, len(found)), OfWeights(node)))
        return found

    def _weights_input(self, constant: ov.Node, index: int) -> ov.Node:
        shape = constant.get_output_partial_shape(0)
        parameter = named_parameter(f"in{index}.weights", shape, constant.get_element_type())
        redirect(constant.output(0), parameter.output(0))
        return parameter

    def results(self, values: Sequence[ov.Output]) -> list[ov.Node]:
        return [named_result(f"out{index}", value) for index, value in enumerate(values)]


def _model(results: list[ov.Node], inputs: list[ov.Node], name: str) -> ov.Model:
    """Return the model of a part. The names that OpenVINO numbers for a process become those that any process gives."""
    model = ov.Model(results, inputs, name)  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs
    for place, node in enumerate(model.get_ordered_ops()):
        if _NUMBERED.fullmatch(node.get_friendly_name()):
            node.set_friendly_name(f"{node.get_type_name()}.{place}")
    return model


def _bytes_of(constant: ov.Node) -> bytes:
    return np.asarray(constant.data).tobytes()


def group_segments(signatures: Sequence[int]) -> list[Group]:
    """Return the segments in groups, of which as few as possible differ, and then as few as possible follow each other.

    Segments are joined only if that leaves fewer different groups: ``1 2 3 2 1 2 3 2`` becomes ``12 32 12 32``, since 2 is
    always the second of two; ``1 1 1 2`` stays as it is. So does ``1 9 2 9 3``, of which nothing would repeat any more.
    """
    groups: list[Group] = [(signature,) for signature in signatures]
    while True:
        joined = [_joined(groups, group, is_second) for group in dict.fromkeys(groups) for is_second in (True, False)]
        kept = [found for found in joined if _repeats(found) or not _repeats(groups)]
        best = min(kept, key=lambda found: (len(set(found)), len(found)), default=groups)
        if len(set(best)) >= len(set(groups)):
            return groups
        groups = best


def _repeats(groups: Sequence[Group]) -> bool:
    return len(set(groups)) < len(groups)


def _joined(groups: Sequence[Group], wanted: Group, is_second: bool) -> list[Group]:
    """Return the groups after every ``wanted`` one was joined to the one before it, or to the one after it."""
    is_doubled = any(first == second == wanted for first, second in pairwise(groups))
    if is_doubled:
        return list(groups)
    found: list[Group] = []
    is_open = False
    for group in groups:
        is_joined = bool(found) and (group == wanted if is_second else is_open)
        if is_joined:
            found[-1] = (*found[-1], *group)
        else:
            found.append(group)
        is_open = group == wanted
    return found

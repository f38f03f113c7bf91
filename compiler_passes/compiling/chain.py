"""Programs in parts: how the parts of a chain are bound to memory, and run one after another.

A chain takes the place of a compiled program. Its parts are compiled once, however often they are called; weights, keys and
values are inputs of the calls. Between two calls the device is free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from ..blocks.chain_model import (
    BlockInput,
    ChainCall,
    ChainModel,
    ChainPort,
    OfPort,
    OfRows,
    OfWeights,
    OfWire,
    OfWireRows,
    Place,
    WireType,
)
from .weight_bank import WeightBank


@dataclass(frozen=True)
class RowsOf:
    """Rows of an entry of the bank, chosen by the values of a port."""

    entry: int
    port: str


@dataclass(frozen=True)
class EntryOf:
    """An entry of the bank."""

    entry: int


PlannedInput: TypeAlias = OfPort | OfWire | OfWireRows | EntryOf | RowsOf


@dataclass(frozen=True)
class PlannedCall:
    """One call: the number of its part, what its inputs read, and what its outputs write."""

    part: int
    inputs: tuple[PlannedInput, ...]
    outputs: tuple[OfPort | OfWire, ...]


@dataclass(frozen=True)
class ChainPlan:
    """The calls of a chain, without its models."""

    places: tuple[Place, ...]
    calls: tuple[PlannedCall, ...]
    wires: tuple[WireType, ...]
    inputs: tuple[ChainPort, ...]
    outputs: tuple[ChainPort, ...]


def plan_chain(chain: ChainModel, bank: WeightBank) -> ChainPlan:
    """Return the calls of a chain. Its constants become entries of the bank."""

    def planned(call: ChainCall) -> PlannedCall:
        return PlannedCall(call.part, tuple(_planned_input(each, bank) for each in call.inputs), call.outputs)

    places: tuple[Place, ...] = tuple(part.place for part in chain.parts)
    return ChainPlan(places, tuple(map(planned, chain.calls)), chain.wires, chain.inputs, chain.outputs)


def _planned_input(read: BlockInput, bank: WeightBank) -> PlannedInput:
    if isinstance(read, OfWeights):
        return EntryOf(bank.add(read.constant))
    return RowsOf(bank.add(read.table), read.port) if isinstance(read, OfRows) else read


@dataclass(frozen=True)
class PartBlob:
    """A part that was compiled for a device that is elsewhere. It can be exported, and cannot run.

    ``requirements``: what its device is asked before it imports the blob (OpenVINO's ``RUNTIME_REQUIREMENTS``).
    """

    name: str
    blob: bytes
    requirements: str = ""


@dataclass(frozen=True)
class HostPart:
    """The part that the host runs. Its model is kept, because a compiled one fits one processor only."""

    model: ov.Model
    program: ov.CompiledModel


CompiledPart: TypeAlias = ov.CompiledModel | HostPart | PartBlob


@dataclass(frozen=True)
class BoundCall:
    """One inference request whose ports are bound to memory that lives as long as ``memory``; ``picks`` are filled first."""

    request: ov.InferRequest
    memory: tuple[Any, ...]
    picks: tuple[_Picks, ...] = ()

    def rebind(self, inputs: Mapping[str, ov.Tensor]) -> None:
        """Let the request read other memory from its next run on, by the name of the port; the caller keeps the memory."""
        for name, tensor in inputs.items():
            self.request.set_tensor(name, tensor)

    def start(self) -> None:
        """Start, and return at once."""
        for picks in self.picks:
            picks.fill()
        self.request.start_async()

    def wait(self) -> None:
        """Wait for the end.

        Raises:
            RuntimeError: of the device.
        """
        self.request.wait()


class CompiledChain:
    """The compiled parts of a chain, which one program of a model's variant consists of, and the weights of the model."""

    def __init__(self, plan: ChainPlan, parts: Sequence[CompiledPart], bank: WeightBank) -> None:
        self.plan = plan
        self.parts = tuple(parts)
        self.bank = bank

    @property
    def placed_parts(self) -> Iterator[tuple[CompiledPart, Place]]:
        """Each part, and where it runs."""
        return zip(self.parts, self.plan.places, strict=True)

    @property
    def is_here(self) -> bool:
        """Whether all parts can run on this machine."""
        return not any(isinstance(part, PartBlob) for part in self.parts)

    @property
    def entries_of_device(self) -> frozenset[int]:
        """The entries of the bank that the device reads. The host reads the others where they are."""
        calls = (call for call in self.plan.calls if self.plan.places[call.part] == "device")
        return frozenset(each.entry for call in calls for each in call.inputs if isinstance(each, EntryOf))

    @property
    def inputs(self) -> tuple[ChainPort, ...]:
        return self.plan.inputs

    @property
    def outputs(self) -> tuple[ChainPort, ...]:
        return self.plan.outputs

    def bound_calls(self, tensors: Mapping[str, ov.Tensor]) -> list[BoundCall]:
        """Return the calls, bound to ``tensors`` by port name, which the caller keeps, and to wires of their own."""
        self.bank.settle(self.entries_of_device)
        wires = make_wires(self.plan)
        return [self._bound(call, tensors, wires) for call in self.plan.calls]

    def _bound(self, call: PlannedCall, tensors: Mapping[str, ov.Tensor], wires: Sequence[_Wire]) -> BoundCall:
        part = self.parts[call.part]
        assert not isinstance(part, PartBlob), "it was compiled for a device that is elsewhere"
        program = part.program if isinstance(part, HostPart) else part
        request = program.create_infer_request()
        picks = list[_Picks]()
        for port, read in zip(program.inputs, call.inputs, strict=True):
            if isinstance(read, RowsOf):
                entry = self.bank.entries[read.entry]
                table = entry.data.reshape(entry.shape[0], -1)
                picks.append(_Picks.of(table, tensors[read.port], entry.shape[1:], entry.element_type))
                request.set_tensor(port, picks[-1].tensor)
            elif isinstance(read, OfWireRows):
                wire = self.plan.wires[read.number]
                table = wires[read.number].memory.reshape(wire.shape[1], -1)
                picks.append(_Picks.of(table, tensors[read.port], wire.shape[2:], wire.element_type, lead=(1,)))
                request.set_tensor(port, picks[-1].tensor)
            elif isinstance(read, EntryOf):
                request.set_tensor(port, self.bank.tensor(read.entry))
            else:
                request.set_tensor(port, _tensor_at(read, tensors, wires))
        for port, written in zip(program.outputs, call.outputs, strict=True):
            request.set_tensor(port, _tensor_at(written, tensors, wires))
        return BoundCall(request, (wires, tensors, self.bank), tuple(picks))


@dataclass(frozen=True)
class _Picks:
    """Picked rows of a table, whose rows are bytes here: ``[n, bytes of a row]``."""

    table: NDArray[np.uint8]
    ids: ov.Tensor
    rows: NDArray[np.uint8]
    tensor: ov.Tensor

    @classmethod
    def of(
        cls,
        table: NDArray[np.uint8],
        ids: ov.Tensor,
        row: tuple[int, ...],
        element_type: ov.Type,
        lead: tuple[int, ...] = (),
    ) -> _Picks:
        """Allocate room for one row per value of ``ids``, as a tensor ``[*lead, count, *row]``."""
        rows = np.zeros((ids.size, table.shape[1]), np.uint8)
        return cls(table, ids, rows, ov.Tensor(rows, ov.Shape([*lead, ids.size, *row]), element_type))

    def fill(self) -> None:
        """Copy the rows."""
        np.take(self.table, self.ids.data.reshape(-1), axis=0, out=self.rows, mode="clip")  # other modes copy twice


@dataclass(frozen=True)
class _Wire:
    """The memory of a wire, and the tensor over it."""

    memory: NDArray[np.uint8]
    tensor: ov.Tensor


def _tensor_at(end: OfPort | OfWire, tensors: Mapping[str, ov.Tensor], wires: Sequence[_Wire]) -> ov.Tensor:
    return tensors[end.name] if isinstance(end, OfPort) else wires[end.number].tensor


def make_wires(plan: ChainPlan) -> tuple[_Wire, ...]:
    """Return the memory of each wire. Wires that are not needed at the same time share it."""
    last_read = {number: place for place, call in enumerate(plan.calls) for number in _wires_in(call.inputs)}
    free = dict[int, list[NDArray[np.uint8]]]()
    found = dict[int, _Wire]()
    for place, call in enumerate(plan.calls):
        for number in _wires_in(call.outputs):
            wire = plan.wires[number]
            size = math.prod(wire.shape) * wire.element_type.bitwidth // 8
            room = free.get(size)
            memory = room.pop() if room else np.zeros(size, np.uint8)
            found[number] = _Wire(memory, ov.Tensor(memory, ov.Shape(wire.shape), wire.element_type))
        for number in {*_wires_in(call.inputs), *_wires_in(call.outputs)}:
            if last_read.get(number, place) == place:
                free.setdefault(found[number].memory.nbytes, []).append(found[number].memory)
    return tuple(found[number] for number in range(len(plan.wires)))


def wire_bytes(plan: ChainPlan) -> int:
    """Return the bytes of the memory of all wires."""
    return sum({id(wire.memory): wire.memory.nbytes for wire in make_wires(plan)}.values())


def _wires_in(ends: Sequence[Any]) -> Iterator[int]:
    return (end.number for end in ends if isinstance(end, OfWire | OfWireRows))


def bind_calls(program: AnyProgram, tensors: Mapping[str, ov.Tensor]) -> list[BoundCall]:
    """Return the calls of a program of either kind, bound to ``tensors`` by port name, which the caller keeps."""
    if isinstance(program, CompiledChain):
        return program.bound_calls(tensors)
    request = program.create_infer_request()
    for port in (*program.inputs, *program.outputs):
        (name,) = port.get_names() & tensors.keys()  # plugins add names of their own
        request.set_tensor(port, tensors[name])
    return [BoundCall(request, (tensors,))]


AnyProgram: TypeAlias = ov.CompiledModel | CompiledChain
"""A compiled program: one model, or a chain."""


def device_models(program: AnyProgram) -> list[ov.CompiledModel]:
    """Return the models that the device runs for a program, each once."""
    if not isinstance(program, CompiledChain):
        return [program]
    found = {id(part): part for part in program.parts if not isinstance(part, HostPart | PartBlob)}
    return list(found.values())

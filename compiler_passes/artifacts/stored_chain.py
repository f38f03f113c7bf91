"""Chains of compiled parts as files: one for each part, one for the calls of each program, and two for the weights.

The files come from an untrusted source, so every number is checked before it is used.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np
import openvino as ov
from msgspec import Meta

from staticllm.devices import get_core
from staticllm.errors import BlobError, DeviceError, last_line

from ...kvcache.arena import Allocate
from ..blocks.chain_model import ChainPort, OfPort, OfWire, OfWireRows, Place, WireType
from ..compiling.chain import (
    ChainPlan,
    CompiledChain,
    CompiledPart,
    EntryOf,
    HostPart,
    PartBlob,
    PlannedCall,
    PlannedInput,
    RowsOf,
)
from ..compiling.chain_compiler import compile_for_host
from ..compiling.weight_bank import WeightBank, Weights
from .blob_set import ImportTarget, Piece, import_blob, tensor_of

WEIGHTS, BANK = "weights", "bank"
"""Names of the files with the bytes of all weights, and with the place of each in them."""
MAX_BYTES, ALIGNMENT = 64 << 20, 4096
Number = Annotated[int, Meta(ge=0, le=1 << 40)]
Dim = Annotated[int, Meta(ge=0, le=1 << 32)]
Text = Annotated[str, Meta(max_length=256)]
ElementType = Literal[
    "f32", "f16", "bf16", "f64", "i64", "i32", "i16", "i8", "i4", "u64", "u32", "u16", "u8", "u4", "boolean", "nf4", "f8e4m3",
    "f8e5m2", "f8e8m0", "f4e2m1", "u2", "u3", "u6",
]  # fmt: skip
LENGTH_BYTES = 8
MAX_WIRE_BYTES = 1 << 36
Pieces = tuple[Piece, ...]
"""The contents of a file, in pieces."""


def type_of(name: str) -> ov.Type:
    found: ov.Type = getattr(ov.Type, name)
    return found


def _name_of(element_type: ov.Type) -> ElementType:
    return cast(ElementType, element_type.get_type_name())


class _Typed(msgspec.Struct, forbid_unknown_fields=True):
    type: ElementType
    shape: Annotated[list[Dim], Meta(max_length=16)]

    @property
    def num_bytes(self) -> int:
        return int(math.prod(self.shape) * type_of(self.type).bitwidth + 7) // 8


class _Named(_Typed):
    name: Text


class _StoredEntry(_Typed):
    offset: Number


class _End(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Where a value comes from or goes to: a port, a wire, an entry of the bank, or rows of an entry that a port chooses."""

    port: Text = ""
    wire: Number | None = None
    entry: Number | None = None


class _StoredCall(msgspec.Struct, forbid_unknown_fields=True):
    part: Number
    inputs: list[_End]
    outputs: list[_End]


class _StoredPart(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    file: Text
    place: Place
    requirements: Annotated[str, Meta(max_length=4096)] = ""


class _Chain(msgspec.Struct, forbid_unknown_fields=True):
    parts: list[_StoredPart]
    calls: list[_StoredCall]
    wires: list[_Typed]
    inputs: list[_Named]
    outputs: list[_Named]


class _Bank(msgspec.Struct, forbid_unknown_fields=True):
    entries: list[_StoredEntry]


@dataclass
class ChainFiles:
    """Collects the files of the chains of one model. ``export``: returns the bytes of a part."""

    export: Callable[[CompiledPart], bytes]
    files: dict[str, Pieces] = field(default_factory=dict)
    _parts: dict[int, str] = field(default_factory=dict)

    def add(self, chain: CompiledChain, name: str) -> None:
        """Add the file ``name`` with the calls of a chain, and a file for each part that is new."""
        stems = [self._part(part, place) for part, place in zip(chain.parts, chain.plan.places, strict=True)]
        plan = chain.plan
        stored = _Chain(
            [
                _StoredPart(stem, place, part.requirements if isinstance(part, PartBlob) else "")
                for stem, place, part in zip(stems, plan.places, chain.parts, strict=True)
            ],
            [_StoredCall(call.part, [*map(_end, call.inputs)], [*map(_end, call.outputs)]) for call in plan.calls],
            [_Typed(_name_of(wire.element_type), list(wire.shape)) for wire in plan.wires],
            [*map(_named, plan.inputs)],
            [*map(_named, plan.outputs)],
        )
        self.files[name] = (msgspec.json.encode(stored),)

    def _part(self, part: CompiledPart, place: Place) -> str:
        if id(part) not in self._parts:
            stem = f"part{len(self._parts)}-{place}"
            self._parts[id(part)] = stem
            self.files[stem] = (self.export(part),)
        return self._parts[id(part)]

    def contents_of(self, part: CompiledPart) -> bytes:
        """Return the contents of a part's file, which was added."""
        return b"".join(self.files[self._parts[id(part)]])

    def add_bank(self, bank: WeightBank) -> None:
        """Add the files of the weights, after all chains."""
        pieces = list[Piece]()
        starts = list[tuple[int, int]]()
        offset = 0
        for first, size in bank.regions:
            starts.append((first, offset))
            pieces.append(bank.memory(first, size))
            padding = -size % ALIGNMENT
            pieces.append(bytes(padding))
            offset += size + padding
        entries = [_stored_entry(entry, starts) for entry in bank.entries]
        self.files[WEIGHTS] = tuple(pieces)
        self.files[BANK] = (msgspec.json.encode(_Bank(entries)),)


def _stored_entry(entry: Weights, starts: Sequence[tuple[int, int]]) -> _StoredEntry:
    address = entry.data.ctypes.data
    first, offset = max(start for start in starts if start[0] <= address)
    return _StoredEntry(_name_of(entry.element_type), list(entry.shape), offset + address - first)


def _named(port: ChainPort) -> _Named:
    return _Named(_name_of(port.element_type), list(port.shape), port.name)


def _end(end: PlannedInput) -> _End:
    if isinstance(end, OfPort):
        return _End(port=end.name)
    if isinstance(end, OfWire):
        return _End(wire=end.number)
    if isinstance(end, OfWireRows):
        return _End(port=end.port, wire=end.number)
    return _End(port=end.port if isinstance(end, RowsOf) else "", entry=end.entry)


@dataclass(frozen=True)
class StoredChain:
    """The calls of a chain, the files of its parts, and what a device is asked before it imports them.

    ``requirements``: each once; one is empty if a part for a device does not say what it needs.
    """

    plan: ChainPlan
    files: tuple[str, ...]
    requirements: tuple[str, ...]


def read_chain(data: bytes, bank: WeightBank) -> StoredChain:
    """Return the calls of a chain, checked.

    Raises:
        BlobError: it is no chain, or an impossible one.
    """
    stored = _decoded(data, _Chain)
    plan = ChainPlan(
        tuple(part.place for part in stored.parts),
        tuple(
            PlannedCall(call.part, tuple(map(_input, call.inputs)), tuple(map(_output, call.outputs)))
            for call in stored.calls
        ),
        tuple(WireType(tuple(wire.shape), type_of(wire.type)) for wire in stored.wires),
        tuple(ChainPort(port.name, tuple(port.shape), type_of(port.type)) for port in stored.inputs),
        tuple(ChainPort(port.name, tuple(port.shape), type_of(port.type)) for port in stored.outputs),
    )
    _check(plan, bank)
    if sum(wire.num_bytes for wire in stored.wires) > MAX_WIRE_BYTES:
        raise BlobError(f"a chain has more than {MAX_WIRE_BYTES >> 30} GiB between its parts: export it again")
    requirements = tuple(dict.fromkeys(part.requirements for part in stored.parts if part.place == "device"))
    return StoredChain(plan, tuple(part.file for part in stored.parts), requirements)


def _input(end: _End) -> PlannedInput:
    if end.entry is not None:
        return RowsOf(end.entry, end.port) if end.port else EntryOf(end.entry)
    if end.wire is not None:
        return OfWireRows(end.wire, end.port) if end.port else OfWire(end.wire)
    return OfPort(end.port)


def _output(end: _End) -> OfPort | OfWire:
    if end.entry is not None or (end.wire is not None and end.port):
        raise BlobError("a chain writes to its weights or to rows of a wire: export it again")
    return OfWire(end.wire) if end.wire is not None else OfPort(end.port)


def _check(plan: ChainPlan, bank: WeightBank) -> None:
    """Check that all numbers and names exist, and that a wire is written before it is read. Raises ``BlobError``."""
    outputs = {port.name for port in plan.outputs}
    written = set[int]()
    for call in plan.calls:
        _require(call.part < len(plan.places), "part", call.part)
        for read in call.inputs:
            _check_input(read, plan, bank, written)
        for target in call.outputs:
            if isinstance(target, OfWire):
                _require(target.number < len(plan.wires), "wire", target.number)
                written.add(target.number)
            else:
                _require(target.name in outputs, "output", target.name)
    _require(bool(plan.calls) and all(number in written for number in range(len(plan.wires))), "wire", len(written))


def _check_input(read: PlannedInput, plan: ChainPlan, bank: WeightBank, written: set[int]) -> None:
    inputs = {port.name: port for port in plan.inputs}
    if isinstance(read, OfWire | OfWireRows):
        _require(read.number in written, "wire", read.number)
    if isinstance(read, EntryOf | RowsOf):
        _require(read.entry < len(bank.entries), "entry", read.entry)
    if isinstance(read, OfPort | RowsOf | OfWireRows):
        name = read.name if isinstance(read, OfPort) else read.port
        _require(name in inputs, "input", name)
    if isinstance(read, RowsOf):
        entry = bank.entries[read.entry]
        has_rows = bool(entry.shape) and entry.data.nbytes % max(entry.shape[0], 1) == 0 < entry.data.nbytes
        _require(has_rows and inputs[read.port].element_type == ov.Type.i64, "table", entry.shape)
    if isinstance(read, OfWireRows):
        shape = plan.wires[read.number].shape
        has_rows = len(shape) >= 2 and shape[0] == 1 <= math.prod(shape)
        _require(has_rows and inputs[read.port].element_type == ov.Type.i64, "wire of rows", shape)


def _require(condition: bool, what: str, value: object) -> None:
    if not condition:
        raise BlobError(f"a chain names a {what} that does not exist, {str(value)[:60]!r}: export it again")


def read_bank(index: bytes, weights: bytes | memoryview, allocate: Allocate | None = None) -> WeightBank:
    """Return the bank of a set; ``allocate`` gives memory of the device.

    Raises:
        BlobError: an entry is outside of the weights.
    """
    bank = WeightBank(allocate)
    data = np.frombuffer(weights, np.uint8)
    for entry in _decoded(index, _Bank).entries:
        end = entry.offset + entry.num_bytes
        _require(end <= len(data) and bool(entry.shape) | (entry.num_bytes > 0), "place of weights", end)
        bank.entries.append(Weights(data[entry.offset : end], tuple(entry.shape), type_of(entry.type)))
    return bank


def _decoded(data: bytes, kind: type[_Chain] | type[_Bank]) -> Any:
    if len(data) > MAX_BYTES:
        raise BlobError(f"a chain has {len(data)} bytes, at most {MAX_BYTES} are read: export it again")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BlobError(f"a chain cannot be read ({reason}): export it again") from None


def export_part(part: CompiledPart) -> bytes:
    """Return the bytes of a part: a device's blob, or the host's graph with its constants."""
    if isinstance(part, PartBlob):
        return part.blob
    if isinstance(part, HostPart):
        with tempfile.TemporaryDirectory(prefix="staticllm-") as folder:
            xml = Path(folder) / "host.xml"
            ov.serialize(part.model, xml)
            graph = xml.read_bytes().replace(b"\r\n", b"\n")  # so that a set has the same bytes from every system
            constants = xml.with_suffix(".bin").read_bytes()
        return len(graph).to_bytes(LENGTH_BYTES, "little") + graph + constants
    return bytes(part.export_model().getvalue())


def import_part(data: bytes, place: Place, target: ImportTarget) -> CompiledPart:
    """Import a part from its bytes.

    Raises:
        BlobError: it was refused.
    """
    if place == "device":
        return import_blob(get_core(), tensor_of(data), target)
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    graph = data[LENGTH_BYTES : LENGTH_BYTES + length]
    constants = data[LENGTH_BYTES + length :]
    try:
        return compile_for_host(get_core().read_model(graph, constants))
    except (RuntimeError, DeviceError) as error:
        raise BlobError(f"the host's part of a chain cannot be read: {last_line(error)}") from error


def stems_of(names: Sequence[str]) -> Mapping[str, str]:
    """Return stem → the name of a file as it was written, with a part of its digest."""
    return {name.removesuffix(".blob").rpartition("-")[0]: name for name in names}

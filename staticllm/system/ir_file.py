"""Reads the structure of an IR file without OpenVINO, which may crash on a damaged file.

The file may contain anything: the parser allows no entities, numbers and depths are bounded, and the time is linear in the size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

MAX_XML = 1 << 30
MAX_DEPTH = 200
MAX_DIGITS = 19
ITEM_BYTES = {
    "u8": 1,
    "i8": 1,
    "boolean": 1,
    "f16": 2,
    "bf16": 2,
    "i32": 4,
    "u32": 4,
    "f32": 4,
    "i64": 8,
    "u64": 8,
    "f64": 8,
}
_NEEDED = {"ReadValue": ("variable_id",), "Assign": ("variable_id",)}
"""Attributes without which OpenVINO's reader crashes."""
Key = tuple[int, str]
"""Number of a graph within the file (loop bodies have layer ids of their own), and the id of a layer in it."""


class IrError(Exception):
    """Describes in a few words what is wrong with an IR."""


@dataclass(frozen=True)
class Constant:
    """A constant in the weights file: element type, shape, offset and size in bytes."""

    element_type: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def end(self) -> int:
        """The first byte after the constant."""
        return self.offset + self.size


@dataclass
class IrFile:
    """Constants by layer, and the layers that feed each layer, as pairs of input port and layer id."""

    constants: dict[Key, Constant] = field(default_factory=dict)
    inputs: dict[Key, list[tuple[int, str]]] = field(default_factory=dict)
    states: dict[str, tuple[int | None, ...]] = field(default_factory=dict)
    """The shape of each state by its variable; None for a dynamic size."""
    operations: set[str] = field(default_factory=set)
    """The types of the layers."""

    @property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """Heads and head size of each state ``[batch, heads, slots, head_dim]``, which grows by one slot per token."""
        shapes = [shape for shape in self.states.values() if len(shape) == 4]
        return [(heads, size) for batch, heads, rows, size in shapes if batch is None is rows and heads and size]

    @property
    def num_weight_bytes(self) -> int:
        """The number of bytes of weights that the constants refer to."""
        return max((constant.end for constant in self.constants.values()), default=0)

    def constants_of(self, layer: Key) -> list[Constant | None]:
        """Return the inputs of a layer in order; None for an input that is not a constant."""
        return [self.constants.get((layer[0], producer)) for _, producer in sorted(self.inputs[layer])]


def read_ir(xml: bytes) -> IrFile:
    """Read the XML of an IR.

    Raises:
        IrError: the XML is not well formed, or has an impossible value.
    """
    reader = _GraphReader()
    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = _no_doctype
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    try:
        parser.Parse(xml, True)
    except expat.ExpatError as error:
        raise IrError(f"is damaged or truncated ({error})") from None
    if not reader.is_net:
        raise IrError("is not an OpenVINO IR: its root is not <net>")
    return reader.found


class _GraphReader:
    """Collects constants and edges while the parser goes through the file."""

    def __init__(self) -> None:
        self.found = IrFile()
        self.is_net = False
        self._graphs = [0]
        self._num_graphs = 1
        self._depth = 0
        self._layer = ""
        self._missing: set[str] = set()  # attributes that this layer still needs

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth == 1:
            self.is_net = name == "net"
        if self._depth > MAX_DEPTH:
            raise IrError(f"is nested more than {MAX_DEPTH} levels deep")
        if name in ("body", "then_body", "else_body"):
            self._graphs.append(self._num_graphs)
            self._num_graphs += 1
        elif name == "layer":
            self._layer = attributes.get("id", "")
            operation = attributes.get("type", "")
            self.found.operations.add(operation)
            self._missing = set(_NEEDED.get(operation, ()))
        elif name == "data" and self._missing:
            self._missing -= attributes.keys()
            if "variable_id" in attributes and "variable_shape" in attributes:
                self.found.states[attributes["variable_id"]] = _open_shape(attributes["variable_shape"])
        elif name == "data" and "offset" in attributes:
            self.found.constants[self._graphs[-1], self._layer] = _constant(attributes)
        elif name == "edge" and "to-layer" in attributes:
            place = _number(attributes.get("to-port", "0")), attributes.get("from-layer", "")
            self.found.inputs.setdefault((self._graphs[-1], attributes["to-layer"]), []).append(place)

    def end(self, name: str) -> None:
        self._depth -= 1
        if name == "layer" and self._missing:
            raise IrError(f"has a state without {min(self._missing)!r}")
        if name in ("body", "then_body", "else_body"):
            self._graphs.pop()


def _no_doctype(*_: object) -> None:
    raise IrError("declares a document type, which an IR never has")


def _constant(attributes: dict[str, str]) -> Constant:
    shape = attributes.get("shape", "")
    sizes = tuple(_number(part.strip()) for part in shape.split(",") if part.strip())
    constant = Constant(
        attributes.get("element_type", ""), sizes, _number(attributes["offset"]), _number(attributes.get("size", ""))
    )
    item = ITEM_BYTES.get(constant.element_type)
    if item is None:
        return constant
    needed = math.prod(sizes) * item
    most = needed or item  # an empty constant of a tokenizer may have one item
    if not needed <= constant.size <= most:
        raise IrError(f"has a constant {constant.element_type}{list(sizes)} of {constant.size} bytes")
    return constant


def _open_shape(text: str) -> tuple[int | None, ...]:
    parts = [part.strip() for part in text.split(",")]
    return tuple(
        int(part) if part.isascii() and part.isdecimal() and len(part) <= MAX_DIGITS else None for part in parts
    )


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS):
        raise IrError(f"has {text[:24]!r} where a number should be")
    return int(text)


def packed_texts(ir: IrFile) -> Iterator[tuple[Constant, Constant, Constant]]:
    """Yield the lists of strings that hold the vocabularies of tokenizers: begin offsets, end offsets, and the bytes of all."""
    for layer in ir.inputs:
        constants = ir.constants_of(layer)
        for begins, ends, text in zip(constants, constants[1:], constants[2:], strict=False):
            if begins is None or ends is None or text is None or len(begins.shape) != 1 or begins.shape != ends.shape:
                continue
            if (begins.element_type, ends.element_type, text.element_type) == ("i32", "i32", "u8"):
                yield begins, ends, text

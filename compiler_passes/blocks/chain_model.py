"""A program as a chain of calls of few models. What differs from call to call, above all the weights, is input."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import openvino as ov

Place = Literal["host", "device"]


@dataclass(frozen=True)
class OfPort:
    """An input or output of the whole program, by its name in ``staticllm/ports.py``."""

    name: str


@dataclass(frozen=True)
class OfWire:
    """A value that one call writes and later ones read, by its number."""

    number: int


@dataclass(frozen=True)
class OfWeights:
    """A constant of the model."""

    constant: ov.Node


@dataclass(frozen=True)
class OfRows:
    """Rows of a constant table ``[n, ...]``, one for each value of a port that holds whole numbers below n.

    The host picks them: a device would read the whole table.
    """

    table: ov.Node
    port: str


@dataclass(frozen=True)
class OfWireRows:
    """Rows of a wire ``[1, n, ...]``, one for each value of a port that holds whole numbers below n. The host picks them."""

    number: int
    port: str


BlockInput: TypeAlias = OfPort | OfWire | OfWireRows | OfWeights | OfRows
BlockOutput: TypeAlias = OfPort | OfWire


@dataclass(frozen=True)
class ChainPart:
    """A model that one call or several run. Parts of several programs that have the same ``key`` are the same."""

    name: str
    place: Place
    model: ov.Model
    key: Hashable


@dataclass(frozen=True)
class ChainCall:
    """One call of a part. Inputs and outputs are in the order of its ports."""

    part: int
    inputs: tuple[BlockInput, ...]
    """What the inputs read."""
    outputs: tuple[BlockOutput, ...]
    """What the outputs write."""


@dataclass(frozen=True)
class WireType:
    """The static shape and the element type of a wire."""

    shape: tuple[int, ...]
    element_type: ov.Type


@dataclass(frozen=True)
class ChainPort:
    """An input or output of the whole program, with those methods of a compiled model's ports that its users need."""

    name: str
    shape: tuple[int, ...]
    element_type: ov.Type

    def get_names(self) -> set[str]:
        return {self.name}

    def get_any_name(self) -> str:
        return self.name

    def get_element_type(self) -> ov.Type:
        return self.element_type

    def get_partial_shape(self) -> ov.PartialShape:
        return self.partial_shape

    @property
    def partial_shape(self) -> ov.PartialShape:
        return ov.PartialShape(list(self.shape))


@dataclass(frozen=True)
class ChainModel:
    """A program in parts, and the calls that make it up, in their order. The first call is the host's."""

    parts: tuple[ChainPart, ...]
    calls: tuple[ChainCall, ...]
    wires: tuple[WireType, ...]
    inputs: tuple[ChainPort, ...]
    outputs: tuple[ChainPort, ...]

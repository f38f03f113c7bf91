"""Holds the weights of all programs of a model once, as tensors that blocks read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.kvcache.arena import Allocate

Place = tuple[int, int]
"""First address and number of bytes."""


@dataclass(frozen=True)
class Weights:
    """One constant: its bytes, shape and element type."""

    data: NDArray[np.uint8]
    shape: tuple[int, ...]
    element_type: ov.Type


class WeightBank:
    """The constants that programs read, each once, however many programs and parts share it.

    They stay where the model has them, usually in the mapped file, or in the bytes of a set. With ``allocate``, ``settle`` copies
    them to memory of the device.
    """

    def __init__(self, allocate: Allocate | None = None) -> None:
        self.entries: list[Weights] = []
        self._allocate = allocate
        self._settled: dict[Place, NDArray[np.uint8]] = {}
        self._numbers: dict[tuple[int, tuple[int, ...], str], int] = {}

    def add(self, constant: ov.Node) -> int:
        """Return the number of a constant's weights, which are added if they are new."""
        data = np.asarray(constant.data).reshape(-1).view(np.uint8)  # holds the memory of the constant
        shape = tuple(constant.get_output_shape(0))
        element_type = constant.get_output_element_type(0)
        key = data.ctypes.data, shape, element_type.get_type_name()
        if key not in self._numbers:
            self._numbers[key] = len(self.entries)
            self.entries.append(Weights(data, shape, element_type))
        return self._numbers[key]

    @property
    def regions(self) -> list[Place]:
        """The memory of all entries, as few disjoint regions in the order of their addresses."""
        found: list[Place] = []
        for first, size in sorted((entry.data.ctypes.data, entry.data.nbytes) for entry in self.entries):
            if found and first < found[-1][0] + found[-1][1]:
                begin = found[-1][0]
                found[-1] = begin, max(found[-1][1], first + size - begin)
            else:
                found.append((first, size))
        return found

    def settle(self) -> None:
        """Copy the weights that are not yet there to the memory of the device, if it has its own. Raises ``MemoryError``."""
        if self._allocate is None:
            return
        for first, size in self.regions:
            if (first, size) not in self._settled:
                target = self._allocate(size)
                target[:] = np.frombuffer(self.memory(first, size), np.uint8)
                self._settled[first, size] = target

    def tensor(self, number: int) -> ov.Tensor:
        """Return a tensor over the bytes of an entry, which live as long as the bank."""
        entry = self.entries[number]
        address = entry.data.ctypes.data
        for (first, size), target in self._settled.items():
            if first <= address and address + entry.data.nbytes <= first + size:
                data = target[address - first : address - first + entry.data.nbytes]
                return ov.Tensor(data, ov.Shape(entry.shape), entry.element_type)
        return ov.Tensor(entry.data, ov.Shape(entry.shape), entry.element_type)

    def memory(self, first: int, size: int) -> memoryview:
        """Return the memory of one of ``regions``."""
        owners = [entry.data for entry in self.entries if first <= entry.data.ctypes.data < first + size]
        whole = next((data for data in owners if data.ctypes.data == first and data.nbytes == size), None)
        if whole is not None:
            return whole.data
        joined = np.empty(size, np.uint8)
        for data in owners:
            begin = data.ctypes.data - first
            joined[begin : begin + data.nbytes] = data
        return joined.data

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights."""
        return sum(size for _, size in self.regions)

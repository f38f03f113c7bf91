"""Holds the weights of all programs of a model once, as tensors that blocks read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from ...kvcache.arena import Allocate

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
    those that the device reads to its memory.
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
        """The memory of all entries, as few disjoint regions, in the order in which the first entry of each was added.

        Addresses are others in each process, this order is not: files of weights are written in it.
        """
        found: list[tuple[int, int, int]] = []  # first address, end, number of the first entry
        places = sorted((each.data.ctypes.data, each.data.nbytes, number) for number, each in enumerate(self.entries))
        for first, size, number in places:
            if found and first < found[-1][1]:
                begin, end, earliest = found[-1]
                found[-1] = begin, max(end, first + size), min(earliest, number)
            else:
                found.append((first, first + size, number))
        return [(first, end - first) for first, end, _ in sorted(found, key=lambda region: region[2])]

    def settle(self, numbers: Iterable[int]) -> None:
        """Copy these entries, unless they are there, to the memory of the device, if it has its own. Raises ``MemoryError``."""
        if self._allocate is None:
            return
        wanted = [self.entries[number].data.ctypes.data for number in numbers]
        for first, size in self.regions:
            if (first, size) not in self._settled and any(first <= address < first + size for address in wanted):
                target = self._allocate(size)
                target[:] = np.frombuffer(self.memory(first, size), np.uint8)
                self._settled[first, size] = target

    def move(self, numbers: Iterable[int]) -> None:
        """Settle these entries, copy the others, and keep nothing of the memory in which they were, if the device has its own.

        For a bank that was read from a file: nothing can be added afterwards. Raises ``MemoryError``.
        """
        if self._allocate is None:
            return
        self.settle(numbers)
        found = [self._settled_data(entry) for entry in self.entries]
        self.entries = [
            replace(entry, data=entry.data.copy() if data is None else data)
            for entry, data in zip(self.entries, found, strict=True)
        ]
        self._settled.clear()
        self._allocate = None

    def tensor(self, number: int) -> ov.Tensor:
        """Return a tensor over the bytes of an entry, which live as long as the bank."""
        entry = self.entries[number]
        data = self._settled_data(entry)
        return ov.Tensor(entry.data if data is None else data, ov.Shape(entry.shape), entry.element_type)

    def _settled_data(self, entry: Weights) -> NDArray[np.uint8] | None:
        """Return the bytes of an entry in the memory of the device; None if they are not there."""
        address = entry.data.ctypes.data
        for (first, size), target in self._settled.items():
            if first <= address and address + entry.data.nbytes <= first + size:
                return target[address - first : address - first + entry.data.nbytes]
        return None

    def memory(self, first: int, size: int) -> memoryview:
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
        return sum(size for _, size in self.regions)

"""The adapters that a pipeline is loaded with, and what their low-rank matrices are in the inputs of its programs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from staticllm.adapters.lora import LoraAdapter, shapes_of
from staticllm.core import AdaptedGroup, AdapterLayout, AdapterType
from staticllm.system.bf16 import to_bf16

AdapterUse = tuple[str, float]
"""The name of an adapter, and the alpha that a request uses it with."""
MAX_ALPHA = 1e6
"""The largest alpha of an adapter, without its sign."""


@dataclass(frozen=True, eq=False)
class AdapterSet:
    """The adapters of a pipeline, each once, and the alphas of requests that name no adapters."""

    adapters: tuple[LoraAdapter, ...]
    alphas: tuple[float, ...]
    is_fused: bool = False
    """Whether they are folded into the weights with these alphas."""
    given: object = None
    """The object that the user gave."""

    @classmethod
    def of(
        cls, members: Iterable[tuple[LoraAdapter, float]], is_fused: bool = False, given: object = None
    ) -> AdapterSet:
        """Return the set of adapters with their alphas. Equal adapters count once, with the sum of their alphas."""
        adapters = dict[str, LoraAdapter]()
        alphas = dict[str, float]()
        for adapter, alpha in members:
            adapters.setdefault(adapter.name, adapter)
            alphas[adapter.name] = alphas.get(adapter.name, 0.0) + alpha
        return cls(tuple(adapters.values()), tuple(alphas.values()), is_fused, given)

    @property
    def num_bytes(self) -> int:
        """The bytes of all matrices in memory: as they were read, and as inputs, about half of which are zeros."""
        return (1 if self.is_fused else 3) * sum(adapter.num_bytes for adapter in self.adapters)

    @cached_property
    def layouts(self) -> tuple[AdapterLayout, ...]:
        """The shapes of each adapter: what the passes must know."""
        return tuple(tuple(shapes_of(adapter)) for adapter in self.adapters)

    @cached_property
    def description(self) -> str:
        """What programs depend on, in a line: the shapes of the matrices, or their numbers if they are folded in."""
        digest = hashlib.blake2b(digest_size=8)
        if self.is_fused:
            digest.update(repr([(each.name, alpha) for each, alpha in self._pairs()]).encode())
            return f"{len(self.adapters)} fused, digest {digest.hexdigest()}"
        digest.update(repr(self.layouts).encode())
        return f"{len(self.adapters)} of layout {digest.hexdigest()}"

    def scales(self, uses: Sequence[AdapterUse] | None) -> tuple[float, ...]:
        """Return one alpha per adapter for a request with these adapters, None for those of the set; () if all are 0.

        Raises:
            KeyError: an adapter is not in the set.
        """
        alphas = list(self.alphas) if uses is None else [0.0] * len(self.adapters)
        places = {adapter.name: index for index, adapter in enumerate(self.adapters)}
        for name, alpha in uses or ():
            alphas[places[name]] += alpha
        return tuple(alphas) if any(alphas) else ()

    def name_of(self, scales: Sequence[float]) -> str:
        """Return what identifies the adapters of a request in another process: names and alphas."""
        names = [f"{each.name} x {alpha:g}" for each, alpha in zip(self.adapters, scales, strict=False) if alpha]
        return ", ".join(names) or "none"

    def matrices(
        self, groups: Sequence[AdaptedGroup], adapter_type: AdapterType = "f32"
    ) -> dict[str, NDArray[np.float32] | NDArray[np.uint16]]:
        """Return port → the matrices of all adapters, ``a [rank, in_size]`` and ``b [out_size, rank]``, with the factors of their
        files.

        Those of the type ``bf16`` are the bits of its numbers as uint16.
        """
        found: dict[str, NDArray[np.float32] | NDArray[np.uint16]] = {}
        for group in groups:
            a = np.zeros((group.rank, group.in_size), np.float32)
            b = np.zeros((group.out_size, group.rank), np.float32)
            for part in group.parts:
                layer = self.adapters[part.adapter].layers[part.path]
                columns = slice(part.first_column, part.first_column + part.rank)
                a[columns] = layer.a
                b[part.first_row : part.first_row + layer.b.shape[0], columns] = layer.b * np.float32(layer.scale)
            for name, values in ((group.a_name, a), (group.b_name, b)):
                found[name] = to_bf16(values) if adapter_type == "bf16" else values
        return found

    def deltas(self) -> Mapping[str, NDArray[np.float32]]:
        """Return path → the sum of all adapters' changes of the weights ``[out, in]``, with the alphas of the set."""
        found: dict[str, NDArray[np.float32]] = {}
        for adapter, alpha in self._pairs():
            for path, layer in adapter.layers.items():
                delta = np.float32(alpha * layer.scale) * (layer.b @ layer.a)
                found[path] = found[path] + delta if path in found else delta
        return found

    def _pairs(self) -> list[tuple[LoraAdapter, float]]:
        return list(zip(self.adapters, self.alphas, strict=True))

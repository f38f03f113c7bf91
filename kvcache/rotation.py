"""Moves keys to other positions without the model: rotary embeddings (RoPE, arXiv 2104.09864) are found by evaluation.

A rotary embedding turns pairs of a key's numbers by an angle that is proportional to the position. So a key at position p becomes
the key at p - d by turning it back by d times the angle of one position. The pairs and angles of each state are found from a few
tokens that the model computes at known positions; values, which do not depend on the position, have angles of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.core import KVState, KVType
from staticllm.system.bf16 import from_bf16, to_bf16

from .groups import StateGroup, group_states

Array = NDArray[Any]
Keys = NDArray[np.float32]
RowsAt = Callable[[int, int], Sequence[Array]]
"""Takes a token and a position; returns the token's keys and values there, if it sees only itself: per group of states
``[n, heads, 1, head_dim]``."""

STEP = 8
"""The factor between the positions that are tried. At the larger one, the error of an angle must stay below half a turn."""
TOLERANCE: dict[KVType, float] = {"f32": 2e-3, "f16": 1e-2, "bf16": 4e-2}
"""The largest difference of a turned key from the model's own, as a share of the key's largest number, by KV type."""


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of one state.

    ``first [n]`` and ``second [n]`` are the places of each pair in a key, and ``angles [n]`` the radians per position.
    """

    first: NDArray[np.intp]
    second: NDArray[np.intp]
    angles: NDArray[np.float64]

    def turned(self, keys: Keys, distance: int) -> Keys:
        """Return ``keys [..., head_dim]`` moved by ``distance`` positions; negative distances move them to the front."""
        turned = keys.copy()
        cos, sin = (f(self.angles * distance).astype(np.float32) for f in (np.cos, np.sin))
        one = keys[..., self.first]
        other = keys[..., self.second]
        turned[..., self.first] = one * cos - other * sin
        turned[..., self.second] = one * sin + other * cos
        return turned


class KeyRotations:
    """The rotations of all KV states of a model, in the order of its groups of states."""

    def __init__(self, states: Sequence[KVState], rotations: Sequence[Rotation]) -> None:
        self._groups = group_states(tuple(states))
        self._types: list[KVType] = [states[group.members[0]].kv_type for group in self._groups]
        self._rotations = list(rotations)

    def turn(self, kv: Sequence[Array], distance: int) -> None:
        """Move keys and values, per group ``[n, heads, count, head_dim]``, by ``distance`` positions, in place."""
        for group, array, kv_type in zip(self._groups, kv, self._types, strict=True):
            for line, member in enumerate(group.members):
                rotation = self._rotations[member]
                if rotation.angles.any():
                    array[line] = _encoded(rotation.turned(_decoded(array[line], kv_type), distance), kv_type)


def find_rotations(
    states: Sequence[KVState], rows_at: RowsAt, tokens: Sequence[int], max_position: int
) -> KeyRotations | None:
    """Return the rotations of a model's states; None if its keys depend on the position in another way, or have another type.

    Args:
        states: The model's KV states.
        rows_at: Computes the keys and values of one token.
        tokens: Token ids to try; the last one only checks what the others showed.
        max_position: The largest position of a key.
    """
    if any(state.kv_type not in TOLERANCE or state.is_scale for state in states):
        return None
    powers = (STEP**power for power in range(max_position.bit_length()))
    positions = sorted({0, *(place for place in powers if place < max_position), max_position * 3 // 4, max_position})
    groups = group_states(tuple(states))
    types: list[KVType] = [states[group.members[0]].kv_type for group in groups]
    shown = {
        (token, position): _rows_of_states(rows_at(token, position), groups, types)
        for token in tokens
        for position in positions
    }
    found: list[Rotation] = []
    for index, state in enumerate(states):
        keys = {key: rows[index] for key, rows in shown.items()}
        rotation = _rotation_of(keys, tokens, positions, TOLERANCE[state.kv_type])
        if rotation is None:
            return None
        found.append(rotation)
    return KeyRotations(states, found)


def _rows_of_states(rows: Sequence[Array], groups: Sequence[StateGroup], types: Sequence[KVType]) -> dict[int, Keys]:
    """Return the f32 keys or values ``[heads, head_dim]`` of each state, by its index."""
    return {
        member: _decoded(array[line, :, 0], kv_type).copy()
        for group, array, kv_type in zip(groups, rows, types, strict=True)
        for line, member in enumerate(group.members)
    }


def _rotation_of(
    keys: dict[tuple[int, int], Keys], tokens: Sequence[int], positions: Sequence[int], tolerance: float
) -> Rotation | None:
    """Return the rotation that explains the keys of all tokens at all positions; None without one."""
    head_dim = keys[tokens[0], 0].shape[-1]
    for first, second in _pairings(head_dim):
        angles = _angles(keys, tokens[:-1], positions, first, second)
        rotation = Rotation(first, second, angles)
        if all(
            _is_close(rotation.turned(keys[token, 0], position), keys[token, position], tolerance)
            for token in tokens
            for position in positions
        ):
            return rotation
    return None


def _pairings(head_dim: int) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Return the ways in which models pair the numbers of a key: halves, or neighbours, of all of them or of the first part."""
    found = []
    for size in dict.fromkeys((head_dim, *(head_dim * part // 8 // 2 * 2 for part in (6, 4, 2, 3, 1)))):
        if size >= 2:
            half = np.arange(size // 2)
            found += [(half, half + size // 2), (2 * half, 2 * half + 1)]
    return found


def _angles(
    keys: dict[tuple[int, int], Keys],
    tokens: Sequence[int],
    positions: Sequence[int],
    first: NDArray[np.intp],
    second: NDArray[np.intp],
) -> NDArray[np.float64]:
    """Return the radians per position of each pair ``[n]``: each larger position makes those of the smaller ones more exact."""
    angles = np.zeros(len(first))
    for position in positions[1:]:
        product = np.zeros(len(first), np.complex128)
        for token in tokens:
            before = keys[token, 0].astype(np.float64)
            after = keys[token, position].astype(np.float64)
            product += (
                ((after[..., first] + 1j * after[..., second]) * np.conj(before[..., first] + 1j * before[..., second]))
                .reshape(-1, len(first))
                .sum(axis=0)
            )
        turn = np.angle(product)
        angles = (turn + 2 * np.pi * np.round((angles * position - turn) / (2 * np.pi))) / position
    angles[np.abs(angles) * positions[-1] < 1e-6] = 0.0
    return angles


def _is_close(found: Keys, expected: Keys, tolerance: float) -> bool:
    return bool(np.abs(found - expected).max() <= tolerance * max(float(np.abs(expected).max()), 1e-6))


def _decoded(array: Array, kv_type: KVType) -> Keys:
    """Return an f32 array of what the arena holds; bf16 is held as its bits."""
    decoded: Keys = from_bf16(array) if kv_type == "bf16" else array.astype(np.float32)
    return decoded


def _encoded(array: Keys, kv_type: KVType) -> Array:
    """Return f32 numbers in the form in which the arena holds them, rounded to the nearest."""
    return to_bf16(array) if kv_type == "bf16" else array.astype(np.float16 if kv_type == "f16" else np.float32)

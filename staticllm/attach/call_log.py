"""The calls of a stateful request since its states were reset, from which the states can be computed again.

Steps of a language model that continue the same rows are joined, so that a conversation is repeated as a prompt and not token
by token. All other calls are kept as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MAX_BYTES = 256 << 20
"""The most bytes of calls that are kept; longer conversations cannot be repeated."""
CHUNK = 32
"""Tokens of a repeated call: its logits must not need more memory than the original calls did."""
APPENDED = frozenset(["input_ids", "inputs_embeds", "position_ids", "token_type_ids"])
ROWS = frozenset(["input_ids", "inputs_embeds"])


class Repeatable(Protocol):
    """What a log needs to repeat its calls."""

    def run(self, inputs: dict[int, Array]) -> None: ...

    def set_state(self, index: int, values: Array) -> None: ...

    def write_state(self, index: int, values: Array) -> None:
        """Write values into the tensor of a state."""
        ...

    def reset_state(self, index: int) -> None: ...


@dataclass(frozen=True)
class StateChange:
    """A state that the program has set itself, or written into; None if it was set back."""

    index: int
    values: Array | None
    is_in_place: bool = False

    @property
    def num_bytes(self) -> int:
        return 0 if self.values is None else self.values.nbytes

    def repeat(self, request: Repeatable) -> None:
        if self.values is None:
            request.reset_state(self.index)
        elif self.is_in_place:
            request.write_state(self.index, self.values)
        else:
            request.set_state(self.index, self.values)


@dataclass(frozen=True)
class SingleCall:
    """A call that is kept as it is."""

    inputs: dict[int, Array]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.inputs.values())

    def repeat(self, request: Repeatable) -> None:
        request.run(self.inputs)


class InputRoles:
    """What the inputs of a language model mean, by their names; ``is_known`` if all of them are known."""

    def __init__(self, names: Sequence[frozenset[str]]) -> None:
        self.appended = {index for index, given in enumerate(names) if given & APPENDED}
        rows = [index for index, given in enumerate(names) if given & ROWS]
        masks = [index for index, given in enumerate(names) if "attention_mask" in given]
        beams = [index for index, given in enumerate(names) if "beam_idx" in given]
        self.rows = rows[0] if rows else -1
        self.mask = masks[0] if masks else -1
        self.beams = beams[0] if beams else -1
        self.is_known = len(rows) == 1 and len(masks) == 1 and len(self.appended) + 1 + len(beams) == len(names)

    def length(self, inputs: dict[int, Array]) -> int:
        """Return the number of tokens of each row in a call."""
        return int(inputs[self.rows].shape[1])

    def axis(self, index: int) -> int:
        """Return the axis along which the tokens of an appended input lie; positions may have several per token."""
        return 1 if index == self.rows else -1


class LoggedSteps:
    """Calls that continue the same rows: parts of the appended inputs, and the last value of the others."""

    def __init__(self, roles: InputRoles, inputs: dict[int, Array]) -> None:
        self._roles = roles
        self._parts = {index: [inputs[index]] for index in roles.appended}
        self._last = {index: array for index, array in inputs.items() if index not in roles.appended}

    @property
    def num_bytes(self) -> int:
        parts = (array for each in self._parts.values() for array in each)
        return sum(array.nbytes for array in (*parts, *self._last.values()))

    def continues(self, inputs: dict[int, Array]) -> bool:
        """Return whether a call continues each row in its place, with a mask that only grows."""
        roles = self._roles
        if any(inputs[index].ndim < 2 for index in (*roles.appended, roles.mask)):
            return False
        old = self._last[roles.mask]
        new = inputs[roles.mask]
        rows = self._parts[roles.rows][0]
        if rows.shape[0] != inputs[roles.rows].shape[0] or rows.ndim != inputs[roles.rows].ndim:
            return False
        if roles.beams >= 0 and not np.array_equal(inputs[roles.beams], np.arange(rows.shape[0])):
            return False
        width = old.shape[1]
        is_longer = new.ndim == 2 and new.shape == (old.shape[0], width + roles.length(inputs))
        return is_longer and np.array_equal(new[:, :width], old)

    def add(self, inputs: dict[int, Array]) -> int:
        """Add a call that continues them, and return the bytes that it adds."""
        mask = self._roles.mask
        added = inputs[mask].nbytes - self._last[mask].nbytes
        self._last[mask] = inputs[mask]
        for index, parts in self._parts.items():
            parts.append(inputs[index])
            added += inputs[index].nbytes
        return added

    def repeat(self, request: Repeatable) -> None:
        """Run the steps on another request, in chunks."""
        roles = self._roles
        whole = {index: np.concatenate(parts, roles.axis(index)) for index, parts in self._parts.items()}
        length = roles.length(whole)
        mask = self._last[roles.mask]
        before = mask.shape[1] - length  # the tokens that earlier entries hold
        for start in range(0, length, CHUNK):
            end = min(start + CHUNK, length)
            inputs = {index: _cut(array, roles.axis(index), start, end) for index, array in whole.items()}
            inputs[roles.mask] = np.ascontiguousarray(mask[:, : before + end])
            if roles.beams >= 0:
                beams = self._last[roles.beams]
                inputs[roles.beams] = beams if start == 0 else np.arange(len(beams), dtype=beams.dtype)
            request.run(inputs)


class CallLog:
    """The calls of one request; its input names decide which of them are joined."""

    def __init__(self, names: Sequence[frozenset[str]]) -> None:
        self._roles = InputRoles(names)
        self._entries: list[LoggedSteps | SingleCall | StateChange] = []
        self._steps: LoggedSteps | None = None  # the last entry, if calls can continue it
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all calls: the states are reset."""
        self._entries.clear()
        self._steps = None
        self._bytes = 0

    def add(self, inputs: dict[int, Array]) -> None:
        """Add a call; the log keeps the arrays, which must not change any more."""
        if self._bytes > MAX_BYTES:
            self._entries.clear()
        elif not self._roles.is_known:
            self._append(SingleCall(inputs))
        elif self._steps is not None and self._steps.continues(inputs):
            self._bytes += self._steps.add(inputs)
        else:
            steps = LoggedSteps(self._roles, inputs)
            self._append(steps)
            self._steps = steps

    def add_state(self, change: StateChange) -> None:
        """Add the change of a state; the log keeps its values, which must not change any more."""
        self._append(change)

    def repeat(self, request: Repeatable) -> None:
        """Run all calls on a request whose states are reset.

        Raises:
            RuntimeError: they were too large to keep.
        """
        if self._bytes > MAX_BYTES:
            raise RuntimeError(
                f"the daemon has ended, and the {self._bytes >> 20} MiB of calls that led to the states of this request are more "
                f"than the {MAX_BYTES >> 20} MiB that are kept: reset_state() begins anew"
            )
        for entry in self._entries:
            entry.repeat(request)

    def _append(self, entry: LoggedSteps | SingleCall | StateChange) -> None:
        self._bytes += entry.num_bytes
        self._entries.append(entry)
        self._steps = None


def _cut(array: Array, axis: int, start: int, end: int) -> Array:
    index = [slice(None)] * array.ndim
    index[axis] = slice(start, end)
    return np.ascontiguousarray(array[tuple(index)])

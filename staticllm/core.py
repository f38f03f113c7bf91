"""The nouns that every folder shares. Frozen, and importing nothing of ours."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

Phase = Literal["prefill", "generate"]
Part = Literal["prefill", "generate", "single_row"]
"""What may have a program and device properties of its own: a phase, or the calls of one row."""
ProgramMode = Literal["separate", "shared"]
ProgramLayout = Literal["separate", "shared", "phases", "single_row"]
"""A program a variant; one for all; one a phase; one for single rows and one for the rest. All but the first share programs."""
KVType = Literal["f32", "f16", "bf16", "u8"]
KV_TYPE_BYTES: dict[KVType, int] = {"f32": 4, "f16": 2, "bf16": 2, "u8": 1}


@dataclass(frozen=True, order=True)
class Variant:
    """The sizes of a step program.

    ``rows`` (S) is how many tokens one call processes, ``kv_len`` (T) how many KV slots it can see, ``sequences`` (R) how
    many sequences can share the rows, each with logits after its last token. A KV length of 0 is a program without past: the
    first chunks of fresh prompts. Where each row is a sequence of its own the program decodes.
    """

    rows: int
    kv_len: int
    sequences: int = 1

    @property
    def phase(self) -> Phase:
        return "generate" if self.rows == self.sequences else "prefill"

    def __str__(self) -> str:
        shared = f"x{self.sequences}" if self.sequences > 1 else ""
        return f"{self.phase}[{self.rows}x{self.kv_len}{shared}]"


@dataclass(frozen=True)
class KVState:
    """A state that grows by one row a token: keys or values of one layer, ``[1, heads, rows, head_dim]``.

    Rows of ``u8`` have a scale state beside them, ``[1, heads, rows, 2]``: what one unit is worth, and the smallest value.
    """

    layer: int
    role: Literal["key", "value"]
    variable_id: str
    heads: int
    head_dim: int
    kv_type: KVType = "f32"
    is_scale: bool = False

    @property
    def past_name(self) -> str:
        return f"past.{self.layer}.{self.role}" + (".scale" if self.is_scale else "")

    @property
    def present_name(self) -> str:
        return f"present.{self.layer}.{self.role}" + (".scale" if self.is_scale else "")

    @property
    def slot_bytes(self) -> int:
        """Bytes that one token takes."""
        return self.heads * self.head_dim * KV_TYPE_BYTES[self.kv_type]


@dataclass(frozen=True)
class RecurrentState:
    """A state of fixed size that every step replaces: of a short convolution, a state space, linear attention.

    ``shape`` has the batch of 1 in front; ``dtype`` is numpy's name of the element type that the model gives it.
    """

    index: int
    variable_id: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8

    @property
    def past_name(self) -> str:
        return f"state.{self.index}"

    @property
    def present_name(self) -> str:
        return f"state.{self.index}.next"


@dataclass(frozen=True)
class MaskKind:
    """What a token may see: everything before it, its last ``window`` tokens, or whatever a ``table`` says.

    ``first_seen[q]``, of a table that was read off the model's own mask, is the first position that the token at q sees.
    """

    window: int | None = None
    table: str = ""
    first_seen: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def first(self, query: int) -> int:
        """The first position that the token at position ``query`` sees; it sees all from there to itself."""
        if self.table:
            return self.first_seen[query]
        return 0 if self.window is None else max(0, query - self.window + 1)

    @property
    def sees_all(self) -> bool:
        """Plain causal attention."""
        return self.window is None and not self.table

    @property
    def label(self) -> str:
        if self.table:
            return f"table:{self.table}"
        return "causal" if self.window is None else f"window:{self.window}"

    @property
    def port_name(self) -> str:
        return f"mask.{self.label}"


KEY_POSITIONS, QUERY_POSITIONS = "key_positions", "query_positions"
"""Ports of models with a bias that depends on the distance of two tokens: positions in their sequences, ``[1, 1, 1, T+S]`` of all
rows that a step sees and ``[1, 1, S, 1]`` of its own."""


@dataclass(frozen=True)
class ModelShape:
    """What the host must know of a lowered model to feed it: the contract between passes, rows and runner."""

    kv_states: tuple[KVState, ...]
    masks: tuple[MaskKind, ...]
    vocab_size: int
    position_rank: int  # 2 for [1, S]; 3 for [k, 1, S] (M-RoPE); 0 if the model takes no positions
    position_copies: int = 1  # k of [k, 1, S]
    is_packable: bool = True  # whether several sequences can share a step
    has_distances: bool = False  # whether it takes the positions of keys and queries
    recurrent_states: tuple[RecurrentState, ...] = ()
    max_rows: int | None = None  # that a call can process, if the model limits them

    @property
    def needs_real_rows(self) -> bool:
        """Whether no row of a call may be idle: a recurrent state would run through it."""
        return bool(self.recurrent_states)

    @property
    def slot_bytes(self) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return sum(state.slot_bytes for state in self.kv_states)

    def slots_of_states(self, kv_len: int) -> int:
        """How many rows the recurrent states of one sequence are worth in memory, ``num_slots`` at most; 0 if there are none."""
        num_bytes = sum(state.num_bytes for state in self.recurrent_states)
        return min(kv_len, -(-num_bytes // self.slot_bytes) if self.slot_bytes else kv_len) if num_bytes else 0


class FinishReason(str, Enum):
    """Why a request ended. Compares equal to its lower-case name and to GenAI's enum member of the same name."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    TOOL_CALL = "tool_call"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.value == str.__str__(other)
        return getattr(other, "name", None) == self.name

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __str__(self) -> str:
        return self.value


Stage = Literal[
    "read", "passes", "compile", "import", "warm-up", "export", "verify", "fallback", "ready", "complete", "error"
]


@dataclass(frozen=True)
class ProgressEvent:
    """One part of loading: number ``index`` of ``total`` in its ``stage``, finished after ``seconds`` of work.

    ``variant`` is None for the stages that are not about one variant. A part that may take minutes (compiling a variant) is
    also announced before it starts: then ``is_done`` is False and ``seconds`` 0. ``ready``: requests can be served, seconds
    since the start; ``complete``: all variants are there. ``fallback`` and ``error`` say in ``message`` what went wrong.
    """

    stage: Stage
    index: int
    total: int
    seconds: float
    variant: Variant | None = None
    is_done: bool = True
    message: str = ""

"""Defines the frozen data types that all packages share, and imports none of our modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeAlias

from msgspec import Meta

Size = Annotated[int, Meta(ge=1, le=1 << 24)]
Count = Annotated[int, Meta(ge=0, le=1 << 24)]
Name = Annotated[str, Meta(max_length=4096)]
"""Numbers and texts with the bounds that are checked when they come from a file (``artifacts/manifest.py``)."""
Work: TypeAlias = tuple[float, ...]
"""The amount of each part of a call, or the seconds per amount."""
Clock = Callable[[], float]
"""Returns the current time in seconds: ``time.perf_counter``, or a simulation's virtual clock."""
Phase = Literal["prefill", "generate"]
Part: TypeAlias = str
"""A part of the work that may have its own program and device properties: a decoder's phases and ``few_rows``, its calls of few
rows, or those that another kind of model names, usually one for all calls (``encode``)."""
ProgramMode = Literal["separate", "shared"]
ProgramLayout = Literal["separate", "shared", "phases", "few_rows", "blocks", "paged"]
"""``separate``: one program per variant; ``blocks``: the same, as chains of blocks over one bank of weights; ``shared``: one for
all; ``phases``: one per phase; ``few_rows``: one for calls of few rows (one row, or as many as a probe finds) and one for the
others."""


def mode_of(layout: ProgramLayout) -> ProgramMode:
    """Return ``separate`` if each variant has a program of its own with this layout, else ``shared``."""
    return "separate" if layout in ("separate", "blocks") else "shared"


KVType = Literal["f32", "f16", "bf16", "u8"]
KV_TYPE_BYTES: dict[KVType, int] = {"f32": 4, "f16": 2, "bf16": 2, "u8": 1}
AdapterType = Literal["f32", "bf16"]
"""Element type of adapter matrices: that in which a program computes."""
MAX_ANSWERS = 128
"""Most answers to one prompt (``num_return_sequences``, ``best_of``, ``n``), in a program, in the daemon and over HTTP."""


@dataclass(frozen=True, order=True)
class Variant:
    """The sizes of a step program.

    A program with KV length 0 has no past and runs the first chunks of new prompts. A program with one row per sequence
    decodes.
    """

    rows: Size
    """The number of tokens that one call processes (S)"""
    kv_len: Count
    """The number of KV slots that it sees (T)"""
    sequences: Size = 1
    """The number of sequences that can share the rows; each has logits after its last row."""
    extra_logits: Count = 0
    """The number of further rows with logits, for example to check drafts."""

    WORK_SECONDS: ClassVar[Work] = (8e-3, 1e-3, 1.2e-7, 1e-6, 0.0)

    @property
    def num_logits(self) -> int:
        """The number of rows with logits (R)."""
        return self.sequences + self.extra_logits

    @property
    def work(self) -> Work:
        """The work of a call: a constant (reading the weights), rows, rows times keys, past, logits."""
        return 1.0, self.rows, self.rows * (self.kv_len + self.rows), self.kv_len, self.num_logits

    @property
    def past_in_pages(self) -> float:
        """The slots that a call over pages reads on average of each of its sequences: KV lengths double from one to the next."""
        return 0.75 * self.kv_len / self.sequences

    @property
    def work_in_pages(self) -> Work:
        """The work of a call over pages, whose rows see the slots of their own sequence only."""
        own = self.past_in_pages + self.rows / self.sequences / 2
        return 1.0, self.rows, self.rows * own, self.sequences * self.past_in_pages, self.num_logits

    @property
    def phase(self) -> Phase:
        """``generate`` if each row is a sequence of its own, else ``prefill``."""
        return "generate" if self.rows == self.sequences else "prefill"

    def __str__(self) -> str:
        shared = f"x{self.sequences}" if self.sequences > 1 else ""
        logits = f",logits={self.num_logits}" if self.extra_logits else ""
        return f"{self.phase}[{self.rows}x{self.kv_len}{shared}{logits}]"


@dataclass(frozen=True)
class KVState:
    """A state that grows by one slot per token: keys or values of one layer, ``[1, heads, slots, head_dim]``."""

    layer: Count
    role: Literal["key", "value"]
    variable_id: Name
    heads: Size
    head_dim: Size
    kv_type: KVType = "f32"
    is_scale: bool = False
    """Whether it holds the scales of a ``u8`` state, ``[1, heads, slots, 2]``: the size of one unit, and the smallest value."""
    is_cross: bool = False
    """Whether it is of cross-attention: it holds the frames of windows, and no step changes it."""

    @property
    def past_name(self) -> str:
        """The name of the program's input port."""
        kind = "cross" if self.is_cross else "past"
        return f"{kind}.{self.layer}.{self.role}" + (".scale" if self.is_scale else "")

    @property
    def present_name(self) -> str:
        """The name of the program's output port: the slots of this call's rows."""
        return f"present.{self.layer}.{self.role}" + (".scale" if self.is_scale else "")

    @property
    def pages_name(self) -> str:
        """The name of a paged program's input port for all pages, which it also writes."""
        return f"pages.{self.layer}.{self.role}"

    @property
    def slot_bytes(self) -> int:
        """The bytes of one token."""
        return self.heads * self.head_dim * KV_TYPE_BYTES[self.kv_type]


@dataclass(frozen=True)
class RecurrentState:
    """A state of fixed size that every step replaces, as in short convolutions, state spaces and linear attention."""

    index: Count
    variable_id: Name
    shape: tuple[Size, ...]
    """Begins with a batch of 1."""
    dtype: Annotated[str, Meta(pattern="^(float32|float16|int64|int32)$")] = "float32"
    """Numpy's name of the state's element type in the model."""

    @property
    def num_bytes(self) -> int:
        import numpy as np  # `staticllm --help` needs none

        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def past_name(self) -> str:
        """The name of the program's input port."""
        return f"state.{self.index}"

    @property
    def present_name(self) -> str:
        """The name of the program's output port: the state after this call."""
        return f"state.{self.index}.next"


@dataclass(frozen=True)
class MaskKind:
    """The positions that a token sees: all before it, its last ``window`` tokens, or those that a ``table`` gives."""

    window: Size | None = None
    table: Annotated[str, Meta(max_length=256)] = ""
    first_seen: tuple[Count, ...] = field(default=(), compare=False, repr=False)
    """Of a table, read from the model's own mask: by the position of a token, the first position that it sees."""

    def first(self, query: int) -> int:
        """Return the first position that the token at position ``query`` sees; it sees all from there to itself."""
        if self.table:
            return self.first_seen[query]
        return 0 if self.window is None else max(0, query - self.window + 1)

    @property
    def sees_all(self) -> bool:
        """Whether the mask is plain causal attention."""
        return self.window is None and not self.table

    @property
    def label(self) -> str:
        """``causal``, ``window:N`` or ``table:NAME``."""
        if self.table:
            return f"table:{self.table}"
        return "causal" if self.window is None else f"window:{self.window}"

    @property
    def port_name(self) -> str:
        """The name of the program's input port for this mask."""
        return f"mask.{self.label}"


KEY_POSITIONS, QUERY_POSITIONS = "key_positions", "query_positions"
"""Ports of models whose attention bias depends on the distance of two tokens. They hold positions: ``[1, 1, 1, T+S]`` for all
slots and rows that a step sees, ``[1, 1, S, 1]`` for its own rows."""


@dataclass(frozen=True)
class CrossWindows:
    """The windows that a model with cross-attention sees: for speech, 30 s of a recording each."""

    model_file: Name
    """Its IR in the model directory, which also holds that of its encoder."""
    cross_window_len: Size
    """The frames of one window."""
    num_cross_windows: Size
    """How many windows a program sees at once."""

    @property
    def frames(self) -> tuple[int, int]:
        """The frames of one window, and the number of windows."""
        return self.cross_window_len, self.num_cross_windows


AdapterLayout = tuple[tuple[str, int, int, int], ...]
"""Shapes of one LoRA adapter: a module's path, the rank, and the widths of the module's input and output."""


@dataclass(frozen=True)
class AdaptedPart:
    """The place of one adapter's matrices for one module in the inputs of a group.

    They are the rows ``[first_column, first_column + rank)`` of ``a``, and these columns of ``b`` from ``first_row`` on.
    """

    adapter: Count
    path: Name
    rank: Size
    first_row: Count
    first_column: Count


@dataclass(frozen=True)
class AdaptedGroup:
    """Matrices of a model that read the same values and that adapters change: ``y += (x @ a.T * scales) @ b.T``.

    All adapters are in ``a [rank, in_size]`` and ``b [out_size, rank]`` side by side; ``scales`` chooses among them for each
    row of a call.
    """

    index: Count
    in_size: Size
    out_size: Size
    """The number of columns of all matrices of the group."""
    parts: tuple[AdaptedPart, ...]

    @property
    def rank(self) -> int:
        """The sum of the ranks of all parts."""
        return sum(part.rank for part in self.parts)

    @property
    def columns(self) -> tuple[int, ...]:
        """The adapter of each of the ``rank`` columns."""
        return tuple(part.adapter for part in self.parts for _ in range(part.rank))

    @property
    def a_name(self) -> str:
        """The name of the program's input port for ``a``."""
        return f"adapter.{self.index}.a"

    @property
    def b_name(self) -> str:
        """The name of the program's input port for ``b``."""
        return f"adapter.{self.index}.b"


@dataclass(frozen=True)
class ModelShape:
    """The inputs, outputs and states of a lowered model: the contract between passes, KV cache and runner."""

    kv_states: tuple[KVState, ...]
    masks: tuple[MaskKind, ...]
    vocab_size: Size  # the numbers per row of the output: of logits, or of an embedding if the head is cut
    position_rank: Annotated[int, Meta(ge=0, le=3)]  # 2: [1, S]; 3: [k, 1, S] (M-RoPE); 0: it takes no positions
    position_copies: Annotated[int, Meta(ge=0, le=64)] = 1  # k of [k, 1, S]
    is_packable: bool = True  # whether several sequences can share a step
    has_distances: bool = False  # whether it takes the positions of keys and queries
    recurrent_states: tuple[RecurrentState, ...] = ()
    max_rows: Size | None = None  # the most rows of a call, if the model limits them
    num_adapters: Annotated[int, Meta(ge=0, le=1 << 14)] = 0  # that a row can have, each with its own scale
    adapted: tuple[AdaptedGroup, ...] = ()  # the matrices that they change
    adapter_type: AdapterType = "f32"
    cross_states: tuple[KVState, ...] = ()  # keys and values of cross-attention, of ``num_cross_windows`` windows
    cross_window_len: Count = 0  # the frames of one window
    num_cross_windows: Count = 0
    rope_limits: tuple[Size, ...] = ()  # lengths of a sequence after which its RoPE factors change, ascending
    page_size: Count = 0  # slots of a page, if programs read and write pages by tables; else 0

    @property
    def cross_len(self) -> int:
        """The frames that cross-attention sees."""
        return self.cross_window_len * self.num_cross_windows

    @property
    def needs_real_rows(self) -> bool:
        """Whether no row of a call may be idle, because it would change a recurrent state."""
        return bool(self.recurrent_states)

    @property
    def slot_bytes(self) -> int:
        """The bytes of one token's keys and values over all layers."""
        return sum(state.slot_bytes for state in self.kv_states)

    def slots_of_states(self, kv_len: int) -> int:
        """Return the number of slots that take as many bytes as one sequence's recurrent states, at most ``kv_len``."""
        num_bytes = sum(state.num_bytes for state in self.recurrent_states)
        return min(kv_len, -(-num_bytes // self.slot_bytes) if self.slot_bytes else kv_len) if num_bytes else 0


@dataclass(frozen=True, order=True)
class CrossWindowVariant:
    """The size of a program that computes keys and values of cross-attention: ``cross_windows``, the windows of one call."""

    cross_windows: Size = 1

    WORK_SECONDS: ClassVar[Work] = (0.0, 0.2)

    @property
    def rows(self) -> int:
        """The windows of one call."""
        return self.cross_windows

    @property
    def work(self) -> Work:
        """The work of a call: a constant, and windows."""
        return 1.0, self.cross_windows

    @property
    def phase(self) -> Literal["encode"]:
        """The only part of its work."""
        return "encode"

    def __str__(self) -> str:
        return f"encode[{self.cross_windows} windows]" if self.cross_windows > 1 else "encode[1 window]"


@dataclass(frozen=True)
class CrossWindowShape:
    """The input and the outputs of such a program: ``[1, bands, columns]`` f32 in, one output per state of cross-attention.

    For speech, the input is a log-mel spectrogram of 30 s. Each output is ``[1, heads, cross_window_len, head_dim]``.
    """

    bands: Size
    columns: Size
    cross_window_len: Size
    states: tuple[KVState, ...]


@dataclass(frozen=True)
class AlignmentShape:
    """The sizes of a program that says which frames of a window the tokens of a text look at."""

    rows: Size
    """The most tokens of a text."""
    num_heads: Size
    """The attentions whose weights it returns."""
    cross_window_len: Size
    states: tuple[KVState, ...]
    """The states of cross-attention, of one window."""


@dataclass(frozen=True, order=True)
class EncoderVariant:
    """The sizes of an encoder program.

    A sequence holds one text, or several texts after each other if the model is packable.
    """

    batch: Size
    """Sequences of a call (B)"""
    rows: Size
    """Tokens of each sequence (S)"""
    texts: Size
    """The most texts (R)"""
    past: Count = 0
    """Above 0, a call continues one text: its rows see the keys and values of up to this many tokens before them (P)"""

    WORK_SECONDS: ClassVar[Work] = (1e-3, 1e-4, 2.5e-8, 1e-7)

    @property
    def work(self) -> Work:
        """The work of a call: a constant (reading the weights), rows, rows times keys, past."""
        rows = self.batch * self.rows
        return 1.0, rows, rows * (self.past + self.rows), self.past

    @property
    def phase(self) -> Literal["encode"]:
        """The only part of an encoder's work."""
        return "encode"

    def __str__(self) -> str:
        past = f",past={self.past}" if self.past else ""
        return f"encode[{self.batch}x{self.rows},texts={self.texts}{past}]"


@dataclass(frozen=True)
class EncoderMask:
    """The tokens of its own text that a token sees: up to ``before`` tokens before it and ``after`` after it; None: all."""

    before: Count | None = None
    after: Count | None = None

    def sees(self, distance: Any) -> Any:
        """Return whether a token sees the token that comes ``distance`` tokens after it, or before it if negative.

        ``distance`` is an integer, or an array of them; the answer is a boolean, or an array of the same shape.
        """
        before = math.inf if self.before is None else self.before
        after = math.inf if self.after is None else self.after
        return (-distance <= before) & (distance <= after)

    @property
    def label(self) -> str:
        """``full``, ``causal``, ``window:N`` (causal, N tokens with its own), or ``local:N`` (N tokens on either side)."""
        if self.after == 0:
            return "causal" if self.before is None else f"window:{self.before + 1}"
        return "full" if self.before is None else f"local:{self.before}"

    @property
    def port_name(self) -> str:
        """The name of the program's input port for this mask."""
        return f"mask.{self.label}"


Pooling = Literal["first", "last", "mean", "mean_sqrt_len", "weighted_mean"]
"""How token vectors become one per text: the first token's (CLS), the last token's, their mean, their sum divided by the square
root of their number, or their mean with weights 1, 2, 3 …"""


PortSize = Annotated[int, Meta(ge=1, le=1 << 16)]
"""Heads of a port of keys or values, or values per head."""


@dataclass(frozen=True)
class EncoderShape:
    """The inputs and the output of a lowered encoder: the contract between its passes and the host."""

    output: Literal["embeddings", "scores"]
    width: Size
    """The numbers per text in the output: the size of an embedding, or the number of a cross-encoder's labels."""
    masks: tuple[EncoderMask, ...]
    max_rows: Size
    """The most rows of any program."""
    pooling: Pooling | None = None
    """The only pooling that is right for the model; None if the host may choose."""
    has_positions: bool = True
    first_position: Count = 0
    """The position of a text's first token."""
    has_token_types: bool = False
    is_packable: bool = True
    """Whether a sequence of a call can hold several texts; else one, which begins at its first row."""
    is_batchable: bool = True
    """Whether a call can have several sequences."""
    unsafe_rows: tuple[Size, ...] = ()
    """Numbers of rows for which no static program is made, because they are also the number of heads."""
    head: Literal["none", "cut", "tokens"] = "none"
    """What became of the head of a causal language model: it was ``cut``, or it computes the logits of a few ``tokens``;
    ``none`` for models that have no such head."""
    shares_prefixes: bool = False
    """Whether texts that begin alike may share the rows of their beginning."""
    skipped_id: Count | None = None
    """Tokens with this id have the position before the first, and those after them are counted without them; None if all tokens
    are counted."""
    past: tuple[tuple[PortSize, PortSize], ...] = ()
    """The heads and the head size of the keys or values in each past port, for a model whose calls can continue a text; else it
    is empty."""
    longest: Count = 0
    """The most tokens of a text that its programs hold; 0 before these are chosen."""
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 32)] | None = None
    """The number of token ids; None if it is unknown."""


class ProgramVariant(Protocol):
    """The sizes of a program of any kind of model: a frozen dataclass of ``Size`` and ``Count``, which can be compared."""

    WORK_SECONDS: ClassVar[Work]
    """The seconds per amount of each part of ``work`` before anything is measured."""

    @property
    def rows(self) -> int:
        """The tokens, or frames, of one sequence of a call."""
        ...

    @property
    def phase(self) -> Part:
        """The part of the work that calls of this size do."""
        ...

    @property
    def work(self) -> Work:
        """The amount of each part of a call. The first is a constant, 1; variants with nearly the same last parts are alike."""
        ...


class FinishReason(StrEnum):
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
    "download",
    "convert",
    "read",
    "passes",
    "compile",
    "import",
    "warm-up",
    "export",
    "verify",
    "fallback",
    "ready",
    "complete",
    "error",
]


@dataclass(frozen=True)
class ProgressEvent:
    """One part of loading: number ``index`` of ``total`` in its ``stage``, finished after ``seconds`` of work.

    A part that may take minutes (compiling a variant) is also announced before it starts, with ``is_done`` False and
    ``seconds`` 0. While any part runs, the same event comes four times a second, with the ``seconds`` so far.

    At ``ready`` requests can be served, and ``seconds`` counts from the start; at ``complete`` all variants are compiled.
    ``fallback`` and ``error`` have their reason in ``message``.
    """

    stage: Stage
    index: int
    total: int
    seconds: float
    variant: ProgramVariant | None = None
    """None in stages that do not concern one variant."""
    is_done: bool = True
    message: str = ""
    part: float = 0.0
    """The estimated fraction of this part that is done."""
    fraction: float = 0.0
    """The estimated fraction of all that happens before ``ready``: it grows with every such event, and is 1 from ``ready`` on."""


OnProgress = Callable[[ProgressEvent], None]
"""Called with each part of loading, on the loading thread."""

"""The results of the diagnostics: frozen values whose fields are the keys of the commands' JSON, in their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from staticllm.compiler_passes.pass_pipeline import PassReport
from staticllm.core import KVType, Part, Phase, ProgramLayout

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class StateReport:
    """One tensor of keys or values: its port, its variable in the model, and the sizes of ``[1, heads, slots, head_dim]``."""

    name: str
    variable: str
    heads: int
    head_dim: int


@dataclass(frozen=True)
class RecurrentStateReport:
    """One recurrent state, which has the same size after any number of tokens: its port, variable, shape and element type."""

    name: str
    variable: str
    shape: tuple[int, ...]
    type: str


@dataclass(frozen=True)
class RecurrentReport:
    """All recurrent states of a model, and the bytes that they take per sequence."""

    num_states: int
    bytes_a_sequence: int
    states: tuple[RecurrentStateReport, ...]


@dataclass(frozen=True)
class LayerReport:
    """One attention layer. ``mask`` is the label of its mask, one of ``ModelReport.masks``."""

    layer: int
    query_heads: int
    kv_heads: int
    head_dim: int
    mask: str


@dataclass(frozen=True)
class KVReport:
    """The KV slots of the arena. ``bytes`` are those of all ``num_slots``, ``host_bytes`` the most that the host pool takes."""

    type: KVType
    num_slots: int
    bytes_a_token: int
    bytes: int
    host_bytes: int


@dataclass(frozen=True)
class VariantReport:
    """The size of one step program: token rows per call, KV slots that it sees, and sequences per call."""

    phase: Phase
    rows: int
    kv_len: int
    sequences: int


@dataclass(frozen=True)
class ModelReport:
    """A lowered model (``staticllm inspect``).

    ``programs`` is how programs share variants, ``num_programs`` how many are compiled. ``settings`` are the precision and the
    quantization of activations, for each part of the work. ``buffers_bytes`` are those of masks, logits and new rows.
    ``is_packable``: whether one call can take rows of several sequences. ``max_num_seqs`` is the most requests that run at once.
    """

    model: str
    device: str
    programs: ProgramLayout
    settings: Mapping[Part, str]
    weights_bytes: int
    vocab_size: int
    num_states: int
    states: tuple[StateReport, ...]
    recurrent: RecurrentReport
    num_programs: int
    is_packable: bool
    layers: tuple[LayerReport, ...]
    masks: tuple[str, ...]
    kv: KVReport
    buffers_bytes: int
    passes: tuple[PassReport, ...]
    max_num_seqs: int
    variants: tuple[VariantReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``staticllm inspect --json`` prints."""
        return asdict(self)


@dataclass(frozen=True)
class ProgramsEstimate:
    """How many programs there are, and how many copies of the weights they hold together."""

    mode: ProgramLayout
    count: int
    copies_of_weights: int


@dataclass(frozen=True)
class VariantEstimate(VariantReport):
    """The size of one step program, and the bytes of its attention masks."""

    mask_bytes: int


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a model would need on a device (``staticllm plan``).

    ``bytes`` has an entry per part (weights, KV slots, host pool, recurrent states, buffers), and ``needed`` is their sum.
    ``available`` and ``fits`` are None if the device does not report its memory.
    """

    model: str
    device: str
    is_present: bool
    programs: ProgramsEstimate
    variants: tuple[VariantEstimate, ...]
    bytes: Mapping[str, int]
    needed: int
    available: int | None
    fits: bool | None

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``staticllm plan --json`` prints."""
        return asdict(self)


@dataclass(frozen=True)
class Agreement:
    """How far a compiled model agrees with the original (``compile --verify``), compared in ``places`` of one text.

    ``agreement`` is the share of places where the most likely token is the same. ``distance`` is the largest difference of
    logits, as a share of the range of the original's logits. ``is_ok``: whether both are within the limits for a blob set.
    ``against`` names the device and the precision of the original.
    """

    is_ok: bool
    agreement: float
    distance: float
    places: int
    against: str

    def as_dict(self) -> dict[str, Any]:
        """Return the object that a manifest stores under ``verification``."""
        return asdict(self)


@dataclass(frozen=True)
class Divergence:
    """How far the probabilities of a model with some settings diverge from those of the original in f32.

    ``mean`` and ``largest`` are Kullback-Leibler divergences per token, in nats, over ``tokens`` places of several texts.
    ``error`` is the standard error of the mean, from the means of the texts. ``agreement`` is the share of places where the
    most likely token is the same. ``chosen_for``: the parts of the work for which the calibration chose these settings.
    ``is_within``: whether the mean is at most that of a setting that may be chosen without being asked for.
    """

    settings: str
    chosen_for: tuple[str, ...]
    mean: float
    error: float
    largest: float
    agreement: float
    tokens: int
    is_within: bool


@dataclass(frozen=True)
class ChosenSettings:
    """The settings of one compiled program, and the calls that it runs: their phases, and their fewest and most rows."""

    settings: str
    phases: tuple[Phase, ...]
    least_rows: int
    most_rows: int


@dataclass(frozen=True)
class ProbeTimes:
    """The ms of the calibration's products with this number of rows, by the name of each setting."""

    rows: int
    ms: Mapping[str, float]


@dataclass(frozen=True)
class NodeShare:
    """The time of one kind of work in one call, in ms and as a share of the call.

    ``kind`` is what the nodes do, ``types`` are their types in the plugin, and ``count`` is their number.
    """

    kind: str
    types: tuple[str, ...]
    count: int
    ms: float
    share: float


@dataclass(frozen=True)
class CallProfile:
    """Where the time of one call of a program goes. ``ms`` is the sum over all nodes."""

    variant: str
    settings: str
    ms: float
    nodes: tuple[NodeShare, ...]


@dataclass(frozen=True)
class Verdict:
    """One check of ``staticllm verify``.

    ``value`` is the largest difference as a share of the range of the logits, or the share of equal tokens.
    """

    check: str
    is_ok: bool
    value: float
    detail: str = ""


@dataclass(frozen=True)
class Finding:
    """One line of ``staticllm doctor``. ``remedy`` is empty if nothing need be done."""

    level: Level
    name: str
    value: str
    remedy: str = ""

"""The results of the diagnostics: frozen values whose fields are the keys of the commands' JSON, and their lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from staticllm.core import KVType, Part, Phase, Pooling, ProgramLayout, ProgramVariant

from ...compiler_passes.pass_pipeline import PassReport

Level = Literal["ok", "warn", "fail"]
PoolingDecider = Literal["the model's graph", "the user", "the model's files", "the default"]
SecondsBasis = Literal["measured now", "kept in the cache", "unknown"]


def mib(num_bytes: int, width: int = 0) -> str:
    """Return a number of bytes as text, in MiB."""
    return f"{num_bytes / 2**20:{width}.1f} MiB"


@dataclass(frozen=True)
class ModelReport:
    """A lowered model of any kind (``staticllm inspect``)."""

    model: str
    kind: str
    device: str
    programs: ProgramLayout
    """How programs share variants."""
    num_programs: int
    """How many are compiled."""
    settings: Mapping[Part, str] | str
    """The precision and the quantization of activations, of each part of the work where parts can differ."""
    weights_bytes: int
    buffers_bytes: int
    """Bytes of the host's memory behind the ports."""
    passes: tuple[PassReport, ...]
    variants: tuple[Any, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``staticllm inspect --json`` prints."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the lines that ``staticllm inspect`` prints."""
        rows = [f"{name:<10}{text}" for name, text in self.rows()]
        return [*rows, "", *self.tables(), "pass                       nodes          what it did", *self._passes()]

    def rows(self) -> list[tuple[str, str]]:
        """Return what is said of the model, each with its name."""
        return [
            ("model", self.model),
            ("kind", self.kind),
            ("weights", mib(self.weights_bytes)),
            ("buffers", mib(self.buffers_bytes)),
            ("programs", f"{self.num_programs} {self.programs} on {self.device}"),
            ("variants", ", ".join(map(str, self.variants))),
        ]

    def tables(self) -> list[str]:
        """Return the lines of further tables, each followed by an empty line."""
        return []

    def _passes(self) -> Iterable[str]:
        for entry in self.passes:
            first, *more = entry.notes or ("",)
            yield f"{entry.name:<25}  {entry.nodes_before:>5} → {entry.nodes_after:<5}  {first}"
            yield from (" " * 42 + note for note in more)


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
    """One attention layer."""

    layer: int
    query_heads: int
    kv_heads: int
    head_dim: int
    mask: str
    """The label of its mask, one of ``DecoderReport.masks``."""


@dataclass(frozen=True)
class KVReport:
    """The KV slots of the arena."""

    type: KVType
    num_slots: int
    bytes_a_token: int
    bytes: int
    """Bytes of all ``num_slots``."""
    host_bytes: int
    """The most that the host pool takes."""


@dataclass(frozen=True)
class VariantReport:
    """The size of one step program: token rows per call, KV slots that it sees, and sequences per call."""

    phase: Phase
    rows: int
    kv_len: int
    sequences: int


@dataclass(frozen=True)
class DecoderReport(ModelReport):
    """A lowered decoder."""

    settings: Mapping[Part, str]
    variants: tuple[VariantReport, ...]
    vocab_size: int
    num_states: int
    states: tuple[StateReport, ...]
    recurrent: RecurrentReport
    is_packable: bool
    """Whether one call can take rows of several sequences."""
    rope_limits: tuple[int, ...]
    """The lengths of a text after which the model has other RoPE factors."""
    layers: tuple[LayerReport, ...]
    masks: tuple[str, ...]
    kv: KVReport
    max_num_seqs: int
    """The most requests that run at once."""

    def rows(self) -> list[tuple[str, str]]:
        kv = self.kv
        slots = f"{kv.type}, {kv.bytes_a_token} bytes per token, {mib(kv.bytes)} for {kv.num_slots} slots"
        host = f"at most {mib(kv.host_bytes)} more in the host pool"
        return [
            ("model", self.model),
            ("weights", mib(self.weights_bytes)),
            ("states", f"{self.num_states} in {len(self.layers)} layers, vocabulary {self.vocab_size}"),
            ("KV slots", slots),
            *self._restrictions(),
            ("buffers", f"{mib(self.buffers_bytes)} for masks, logits and new rows"),
            ("programs", f"{self.programs} on {self.device}"),
            *(("settings", f"{text} ({', '.join(parts)})") for text, parts in _grouped(self.settings.items())),
            ("serves", f"{self.max_num_seqs} requests at once; {host}"),
            *self._sizes(),
        ]

    def tables(self) -> list[str]:
        layers = [
            f"{each.layer:>5}  {each.query_heads:>11}  {each.kv_heads:>8}  {each.head_dim:>9}  {each.mask}"
            for each in self.layers
        ]
        return ["layer  query heads  kv heads  head size  mask", *layers, ""]

    def _restrictions(self) -> list[tuple[str, str]]:
        states = self.recurrent
        if states.num_states:
            size = f"{states.bytes_a_sequence / 1024:.1f} KiB per sequence"
            return [("recurrent", f"{states.num_states} states, {size}; one sequence per call, no idle rows")]
        limits = ", ".join(map(str, self.rope_limits))
        return (
            [("RoPE", f"other factors above {limits} tokens: a text that exceeds them is computed anew")]
            if limits
            else []
        )

    def _sizes(self) -> list[tuple[str, str]]:
        """Return one row for all sizes with the same KV lengths: the rows, and "x sequences" if several share them."""
        sizes = [(f"{v.rows}x{v.sequences}" if v.sequences > 1 else str(v.rows), v.kv_len) for v in self.variants]
        kv_lens = {size: ", ".join(map(str, sorted(found))) for size, found in _grouped((b, a) for a, b in sizes)}
        return [("variants", f"rows {', '.join(rows)}: KV length {text}") for text, rows in _grouped(kv_lens.items())]


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, list[Any]]]:
    """Return each second value with all first values that stand beside it, in their order."""
    found: dict[Any, list[Any]] = {}
    for name, value in pairs:
        found.setdefault(value, []).append(name)
    return list(found.items())


@dataclass(frozen=True)
class EncoderReport(ModelReport):
    """A lowered encoder."""

    settings: str
    output: str
    width: int
    """The numbers per text."""
    masks: tuple[str, ...]
    first_position: int | None
    """The position of a text's first token; None if the model takes no positions."""
    has_token_types: bool
    pooling: Pooling | None
    """None for scores."""
    pooling_source: PoolingDecider
    num_dense: int
    is_normalised: bool
    max_length: int
    """The most tokens of a text."""
    vocab_size: int | None
    is_packable: bool
    shares_prefixes: bool
    """Whether a common beginning of texts is computed once per sequence."""
    reasons: tuple[str, ...]
    """Why texts cannot share a sequence, empty if they can."""
    unsafe_rows: tuple[int, ...]
    """Numbers of rows for which no static program is made."""

    def rows(self) -> list[tuple[str, str]]:
        ids = f", {self.vocab_size} token ids" if self.vocab_size else ""
        positions = "none" if self.first_position is None else f"from {self.first_position}"
        unsafe = f"no static program of {', '.join(map(str, self.unsafe_rows))} rows"
        chunks = " + earlier tokens, for texts that run in chunks" if any(v.past for v in self.variants) else ""
        return [
            ("model", self.model),
            ("kind", f"encoder: {self.output}, {self.width} numbers per text"),
            ("weights", mib(self.weights_bytes)),
            ("texts", f"up to {self.max_length} tokens{ids}"),
            ("masks", ", ".join(self.masks)),
            ("positions", positions + (", token types" if self.has_token_types else "")),
            *([] if self.pooling is None else [("pooling", self._pooling())]),
            ("packable", self._packable()),
            *([("unsafe", unsafe)] if self.unsafe_rows else []),
            ("buffers", f"{mib(self.buffers_bytes)} for masks, pooling and vectors"),
            ("programs", f"{self.num_programs} {self.programs} on {self.device}, {self.settings}"),
            ("variants", f"{', '.join(map(encoder_size, self.variants))} (sequences x tokens{chunks})"),
        ]

    def _pooling(self) -> str:
        dense = f", {self.num_dense} Dense modules" if self.num_dense else ""
        return f"{self.pooling} (from {self.pooling_source}){dense}{', normalised' if self.is_normalised else ''}"

    def _packable(self) -> str:
        if not self.is_packable:
            return "no, one text per sequence: " + "; ".join(self.reasons)
        return "yes, and a common beginning of texts runs once per sequence" if self.shares_prefixes else "yes"


def encoder_size(variant: Any) -> str:
    """Return the sizes of an encoder's variant in short: sequences x tokens, and the earlier tokens that it sees."""
    return f"{variant.batch}x{variant.rows}" + (f"+{variant.past}" if variant.past else "")


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a model needs on a device (``staticllm plan``), in bytes."""

    model: str
    device: str
    is_present: bool
    bytes: Mapping[str, int]
    """An entry per part."""
    needed: int
    """The sum of these bytes."""
    available: int | None
    """None if the device does not report its memory, or if it was measured what the model takes; so is ``fits``."""
    fits: bool | None

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``staticllm plan --json`` prints."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the lines that ``staticllm plan`` prints."""
        found = [self._heading, *(f"  {name:<22} {mib(count, 10)}" for name, count in self.bytes.items())]
        found.append(f"  {'together':<22} {mib(self.needed, 10)}")
        return found + self._fit_lines()

    @property
    def _heading(self) -> str:
        return f"on {self.device}"

    @property
    def _remedy(self) -> str:
        return "choose another device, or weights of fewer bits"

    def _fit_lines(self) -> list[str]:
        if self.available is None:
            missing = f"there is no {self.device} on this machine, so its memory is unknown"
            return [f"{self.device} does not report its memory" if self.is_present else missing]
        verdict = "it fits" if self.fits else f"it does not fit: {self._remedy}"
        return [f"  {'available':<22} {mib(self.available, 10)}", verdict]


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
class DecoderEstimate(MemoryEstimate):
    """The memory of a decoder."""

    programs: ProgramsEstimate
    variants: tuple[VariantEstimate, ...]

    @property
    def _heading(self) -> str:
        return f"{self.programs.count} {self.programs.mode} programs for {len(self.variants)} variants on {self.device}"

    @property
    def _remedy(self) -> str:
        return "lower MAX_PROMPT_LEN, KV_SLOTS or HOST_KV_SLOTS, or choose a smaller KV_CACHE_PRECISION"


@dataclass(frozen=True)
class TimedVariant:
    """The size of one program, its label, the tokens of a call if it has tokens, and its seconds; None if not known."""

    variant: ProgramVariant
    label: str
    num_tokens: int | None
    seconds: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the sizes, and the seconds."""
        sizes: Any = self.variant
        return {**asdict(sizes), "seconds": self.seconds}


@dataclass(frozen=True)
class TimedEstimate(MemoryEstimate):
    """The memory of a model whose calls take the same time whenever they run, and the seconds of each call.

    If they were measured now, so was the memory: ``bytes`` are those of the process.
    """

    programs: ProgramLayout
    num_programs: int
    seconds_source: SecondsBasis
    variants: tuple[TimedVariant, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "variants": [each.as_dict() for each in self.variants]}

    @property
    def _heading(self) -> str:
        return f"{self.num_programs} {self.programs} programs for {len(self.variants)} variants on {self.device}"

    def lines(self) -> list[str]:
        hint = "; --measured measures it, -p CACHE_DIR=… reads it from a cache"
        basis = f"time per call: {self.seconds_source}" + (hint if self.seconds_source == "unknown" else "")
        times = [
            f"  {each.label:<22} {each.seconds * 1e3:9.2f} ms"
            + ("" if each.num_tokens is None else f"  {each.num_tokens / each.seconds:9.0f} tokens/s")
            for each in self.variants
            if each.seconds is not None
        ]
        return [*super().lines(), basis, *times]

    def _fit_lines(self) -> list[str]:
        is_measured = self.seconds_source == "measured now" and self.available is not None
        return [] if is_measured else super()._fit_lines()


@dataclass(frozen=True)
class Agreement:
    """How far a compiled model agrees with the original (``compile --verify``), compared in ``places`` of one text."""

    is_ok: bool
    """Whether both are within the limits for a blob set."""
    agreement: float
    """The share of places where the most likely token is the same."""
    distance: float
    """The largest difference of logits, as a share of the range of the original's logits."""
    places: int
    against: str
    """Names the device and the precision of the original."""

    def as_dict(self) -> dict[str, Any]:
        """Return the object that a manifest stores under ``verification``."""
        return asdict(self)


@dataclass(frozen=True)
class Divergence:
    """How far the probabilities of a model with some settings diverge from those of the original in f32."""

    settings: str
    chosen_for: tuple[str, ...]
    """The parts of the work for which the calibration chose these settings."""
    mean: float
    """Kullback-Leibler divergence per token, in nats, over ``tokens`` places of several texts."""
    error: float
    """The standard error of the mean, from the means of the texts."""
    percentile_99: float
    """The 99th percentile of that divergence."""
    largest: float
    """The largest one."""
    agreement: float
    """The share of places where the most likely token is the same."""
    tokens: int
    is_within: bool
    """Whether the mean is at most that of a setting that may be chosen without being asked for."""
    perplexity: float | None = None
    """The perplexity of the texts with these settings; None where the texts' tokens are not known."""
    exact_perplexity: float | None = None
    """The perplexity of the texts with the original."""


@dataclass(frozen=True)
class ChosenSettings:
    """The settings of one compiled program, and the calls that it runs: their phases, and their fewest and most rows."""

    settings: str
    phases: tuple[Phase, ...]
    least_rows: int
    most_rows: int


@dataclass(frozen=True)
class TokenTimes:
    """The ms of the calibration's products with this number of rows, by the name of each setting."""

    rows: int
    ms: Mapping[str, float]


@dataclass(frozen=True)
class Verdict:
    """One check of ``staticllm verify``."""

    check: str
    is_ok: bool
    value: float
    """The largest difference as a share of the range of the original's numbers, or the share of equal tokens."""
    detail: str = ""
    figure: str = ""
    """Says it in words."""

    def as_dict(self) -> dict[str, Any]:
        """Return the object of the check that ``staticllm verify --json`` prints."""
        return {name: value for name, value in asdict(self).items() if name != "figure"}

    def line(self) -> str:
        """Return the line that ``staticllm verify`` prints."""
        detail = f": {self.detail}" if self.detail else ""
        return f"{'ok  ' if self.is_ok else 'FAIL'} {self.check:<40} {self.figure}{detail}"


def difference(check: str, share: float, tolerance: float, numbers: str = "numbers", detail: str = "") -> Verdict:
    """Return the verdict on numbers that differ by this share of their range."""
    return Verdict(check, share <= tolerance, share, detail, f"{numbers} differ by {share:.1e} of their range")


@dataclass(frozen=True)
class Finding:
    """One line of ``staticllm doctor``."""

    level: Level
    name: str
    value: str
    remedy: str = ""
    """Empty if nothing need be done."""

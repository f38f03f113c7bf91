"""What is predicted of a model on an NPU that is elsewhere: frozen values whose fields are the keys of the commands' JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...compiler_passes.compiling.npu_compiler import LayerTime
from .reports import MemoryEstimate, ModelReport, mib

Role = Literal["head", "block", "tail"]
"""What a part is in a program: it comes before the layers that repeat, is one of these, or comes after them."""
NOT_REPEATING = (
    "no layers repeat: one part has all of them, is compiled as a whole, and can have no step between its layers"
)
HEAD = "part      compiled for                     us       DMA       DPU     SHAVE  DMA tasks    blob KiB  seconds"
MOST_OPERATIONS = 8
"""The kinds of operations of a part that are listed."""
MOST_DEAREST = 3
"""The layers of a part that are listed as text; JSON has more of them."""


@dataclass(frozen=True)
class PartSchedule:
    """The compiler's schedule of one part, in microseconds. Lists begin with what takes longest."""

    name: str
    program: str
    """The one for which it was compiled; others may have it in common."""
    us: float
    repriced_us: float
    """The time with reads of 4-bit weights at the price of their bytes."""
    engines: Mapping[str, float]
    """The time in which each engine is busy."""
    num_dma_tasks: int
    kinds: tuple[LayerTime, ...]
    """Sums over all layers of a kind."""
    dearest: tuple[LayerTime, ...]
    """Single layers."""
    operations: Mapping[str, int]
    """How often the part has each kind of operation, the most frequent ones."""
    blob_bytes: int
    compile_seconds: float

    def lines(self) -> Iterator[str]:
        """Yield the row of the table of parts, and what the part consists of."""
        engines = "  ".join(f"{self.engines.get(name, 0.0):8.1f}" for name in ("DMA", "DPU", "SHAVE"))
        size = f"{self.blob_bytes / 1024:10.0f}  {self.compile_seconds:7.1f}"
        yield f"{self.name:<8}  {self.program:<24}  {self.us:9.1f}  {engines}  {self.num_dma_tasks:9}  {size}"
        total = sum(kind.total for kind in self.kinds) or 1.0
        if self.kinds:
            yield "          kinds: " + ", ".join(f"{each.kind} {each.total / total:.0%}" for each in self.kinds)
        for layer in self.dearest[:MOST_DEAREST]:
            yield f"          {layer.total:9.1f}  {layer.kind}  {layer.name}"


@dataclass(frozen=True)
class PartCalls:
    """How often a program calls a part, which role that has, and how many layers with KV slots each call runs."""

    index: int
    """The part's index among all parts of the model, which have names like it in other programs."""
    part: str
    count: int
    role: Role
    layers: int

    def __str__(self) -> str:
        layers = f"{self.layers} KV layer{'s' if self.layers > 1 else ''} each"
        detail = layers if self.role == "block" and self.layers else self.role
        return f"{f'{self.count} x ' if self.count > 1 else ''}{self.part} ({detail})"


@dataclass(frozen=True)
class ProgramSchedule:
    """One program: the sum of the schedules of its calls on the device, in microseconds.

    Before the calls on the device, the host runs one part.
    """

    program: str
    us: float
    repriced_us: float
    calls: tuple[PartCalls, ...]
    read_bytes: int
    """Bytes of the weights and KV slots that one run reads."""
    roof_us: float
    """The time of these reads alone at the transfer rate of the platform's cost model."""

    def __str__(self) -> str:
        calls = ", ".join(map(str, self.calls))
        return f"  {self.program:<24}  {self.us / 1e3:9.2f} ms  host, {calls}"

    @property
    def num_calls(self) -> int:
        return sum(each.count for each in self.calls)

    @property
    def repeats(self) -> bool:
        return any(each.role == "block" for each in self.calls)


@dataclass(frozen=True)
class CompiledModel:
    """The programs of a model for one platform, and how they were compiled."""

    platform: str
    compiler: str
    parts: tuple[PartSchedule, ...]
    programs: tuple[ProgramSchedule, ...]
    host_operations: Mapping[str, int]
    """How often the host's part of the first program has each kind of operation, the most frequent ones."""

    @property
    def compile_seconds(self) -> float:
        """The compiler's own time for all parts, on this machine."""
        return sum(part.compile_seconds for part in self.parts)

    @property
    def blob_bytes(self) -> int:
        """The bytes of all blobs, without the weights."""
        return sum(part.blob_bytes for part in self.parts)

    @property
    def is_repriced(self) -> bool:
        """Whether the platform's cost model charges too much for this model's reads of 4-bit weights."""
        return any(part.repriced_us < part.us for part in self.parts)


@dataclass(frozen=True)
class NPUReport:
    """A lowered model, and its schedule on an NPU (``staticllm inspect --platform``)."""

    model: ModelReport
    compiled: CompiledModel

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``staticllm inspect --json`` prints: the model's, with ``npu`` beside its fields."""
        return {**self.model.as_dict(), "npu": asdict(self.compiled)}

    def lines(self) -> list[str]:
        found = self.compiled
        return [
            *self.model.lines(),
            "",
            f"programs for NPU {found.platform}, by {found.compiler}; times are predictions of its cost model",
            *map(str, found.programs),
            *([] if found.programs[0].repeats else [f"  {NOT_REPEATING}"]),
            f"  host: {_operations(found.host_operations)}",
            *(f"  {part.name}: {_operations(part.operations)}" for part in self._described()),
            "",
            HEAD,
            *(line for part in found.parts for line in part.lines()),
        ]

    def _described(self) -> Iterator[PartSchedule]:
        """Yield the parts of the first program, each once."""
        return (self.compiled.parts[each.index] for each in self.compiled.programs[0].calls)


def _operations(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


@dataclass(frozen=True)
class PromptTime:
    """The predicted ms until the first token of a prompt that runs alone, and the programs that it runs in, in order."""

    num_tokens: int
    ms: float
    programs: tuple[str, ...]

    @property
    def num_calls(self) -> str:
        """The number of programs in words."""
        return f"{len(self.programs)} calls" if len(self.programs) > 1 else "1 call"


@dataclass(frozen=True)
class TokenTime:
    """The predicted ms of a decode step of one sequence, and how many times longer it is than its reads alone."""

    kv_len: int
    ms: float
    over_roof: float


@dataclass(frozen=True)
class PackedTime:
    """The predicted ms of a decode step of several sequences, and how many times longer it is than that of one."""

    sequences: int
    kv_len: int
    ms: float
    over_one: float


@dataclass(frozen=True)
class PredictedTimes:
    """What a decoder is predicted to take: TTFT of prompts, TPOT of one sequence, and steps of many, if they can share a call."""

    prompts: tuple[PromptTime, ...]
    tokens: tuple[TokenTime, ...]
    packed: PackedTime | None

    def rows(self) -> Iterator[tuple[str, str]]:
        for prompt in self.prompts:
            yield f"TTFT, {prompt.num_tokens} tokens", f"{prompt.ms:.1f} ms in {prompt.num_calls}"
        for token in self.tokens:
            yield f"TPOT, {token.kv_len} KV slots", f"{token.ms:.2f} ms, {token.over_roof:.2f} x its reads"
        if self.packed is not None:
            packed = self.packed
            yield (
                f"{packed.sequences} sequences, {packed.kv_len} slots",
                f"{packed.ms:.2f} ms, {packed.over_one:.2f} x one",
            )


@dataclass(frozen=True)
class NPUEstimate(MemoryEstimate):
    """What a model needs and is predicted to take on an NPU (``staticllm plan --platform``)."""

    compiled: CompiledModel
    device_calls: int
    """The calls of the first program, which is a decode step of one sequence in a decoder."""
    times: PredictedTimes | None
    """None for a model that is no decoder."""
    repriced: PredictedTimes | None
    """None also if the platform prices the model's reads right."""
    unknown: tuple[str, ...]
    """What no schedule can say."""

    def as_dict(self) -> dict[str, Any]:
        sums = {"compile_seconds": self.compiled.compile_seconds, "blob_bytes": self.compiled.blob_bytes}
        return {**asdict(self), **sums}

    @property
    def _heading(self) -> str:
        found = self.compiled
        return (
            f"{len(found.programs)} programs in {len(found.parts)} parts for NPU {found.platform}, by {found.compiler}"
        )

    def lines(self) -> list[str]:
        found = self.compiled
        size = f"{mib(found.blob_bytes)} of blobs, beside the weights"
        lines = [*super().lines(), f"compiled in {found.compile_seconds:.1f} s, {size}"]
        what = "a step of one sequence" if self.times is not None else f"a call of {found.programs[0].program}"
        lines.append(f"{what} takes {self.device_calls} calls of the device, and one on the host")
        if not found.programs[0].repeats:
            lines.append(NOT_REPEATING)
        lines += ["", *self._times(), ""]
        return [*lines, *self.unknown]

    def _times(self) -> Iterator[str]:
        """Yield the table of times; without a decoder's figures, that of the programs."""
        if self.times is None:
            for each in self.compiled.programs:
                other = f"  {each.repriced_us / 1e3:9.2f} ms" if self.compiled.is_repriced else ""
                yield f"{each.program:<28}  {each.us / 1e3:9.2f} ms{other}"
            return
        if self.repriced is None:
            yield from (f"{name:<28}  {text}" for name, text in self.times.rows())
            return
        yield f"{'':<28}  {'as the compiler prices':<28}  4-bit reads by their bytes"
        for (name, text), (_, other) in zip(self.times.rows(), self.repriced.rows(), strict=True):
            yield f"{name:<28}  {text:<28}  {other}"

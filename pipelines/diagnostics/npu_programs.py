"""Compiles the programs of a model for an NPU that is elsewhere, and describes them by the compiler's schedules."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import openvino as ov

from staticllm.core import Variant

from ...compiler_passes.blocks.chain_model import OfPort
from ...compiler_passes.compiling.chain import CompiledChain, EntryOf, HostPart, PartBlob, PlannedCall, wire_bytes
from ...compiler_passes.compiling.compile import CompilePlan, compile_all
from ...compiler_passes.compiling.npu_compiler import Schedule
from ...compiler_passes.compiling.npu_platform import Platform
from ...compiler_passes.npu_compiler.schedule import heaviest
from ..costs.model import CostModel
from ..loading.kind import LoadJob
from ..loading.npu_target import CompiledForNPU
from ..programs.variant_index import VariantIndex, plan_chunks
from .npu_reports import (
    MOST_OPERATIONS,
    CompiledModel,
    PackedTime,
    PartCalls,
    PartSchedule,
    PredictedTimes,
    ProgramSchedule,
    PromptTime,
    Role,
    TokenTime,
)

SHORT_PROMPT = 128
"""Tokens of the shorter prompt whose TTFT is predicted."""
MOST_KINDS, MOST_LAYERS = 6, 10
"""The kinds of layers, and the layers, that a report has of each part."""
_LAYER = re.compile(r"present\.(\d+)\.")
_FORMAL = frozenset({"Constant", "Parameter", "Result", "Convert"})
"""Operations that say nothing about what a part does."""
_US, _MS = 1e-6, 1e3
Seconds = Mapping[Any, float]
"""Predicted seconds per call by variant."""


@dataclass(frozen=True)
class CompiledForReport:
    """The programs of a plan that were compiled for a platform, and all parts that the compiler was given, in order."""

    platform: Platform
    compiler: str
    plan: CompilePlan[Any, Any]
    chains: Mapping[Any, CompiledChain]
    parts: tuple[CompiledForNPU, ...]

    @property
    def weights_bytes(self) -> int:
        """The bytes of the weights of all programs, each once."""
        return next(iter(self.chains.values())).bank.num_bytes

    @property
    def wires_bytes(self) -> int:
        """The bytes of the host's memory between the parts of all programs."""
        return sum(wire_bytes(chain.plan) for chain in self.chains.values())

    def described(self) -> CompiledModel:
        """Return the parts and programs as they are reported."""
        first = next(iter(self.chains.values()))
        hosts = [part.model for part in first.parts if isinstance(part, HostPart)]
        return CompiledModel(
            str(self.platform),
            self.compiler,
            tuple(map(_described_part, self.parts)),
            tuple(self._described_program(variant) for variant in self.chains),
            _operations(hosts),
        )

    def seconds(self, is_repriced: bool) -> dict[Any, float]:
        """Return the predicted seconds per call of each variant.

        Args:
            is_repriced: Whether 4-bit reads are priced by their bytes.
        """
        found = {variant: self._described_program(variant) for variant in self.chains}
        return {variant: (each.repriced_us if is_repriced else each.us) * _US for variant, each in found.items()}

    def roof(self, variant: Any) -> float:
        """Return the seconds in which the weights and KV slots of a variant are read."""
        return self._described_program(variant).roof_us * _US

    def _described_program(self, variant: Any) -> ProgramSchedule:
        chain = self.chains[variant]
        numbers = {id(part.compiled): number for number, part in enumerate(self.parts)}
        calls = [call for call in chain.plan.calls if chain.plan.places[call.part] == "device"]
        found = [numbers[id(part)] for call in calls if isinstance(part := chain.parts[call.part], PartBlob)]
        times = [_schedule_of(self.parts[number]) for number in found]
        read = sum(_read_bytes(call, chain) for call in calls)
        return ProgramSchedule(
            str(variant),
            math.fsum(each.total for each in times),
            math.fsum(each.repriced for each in times),
            tuple(_counted(calls, found, self.parts)),
            read,
            read / self.platform.dma_bytes_per_us,
        )


def compile_for_report(job: LoadJob[Any]) -> CompiledForReport:
    """Compile all programs of a job for its target, with progress. Nothing is kept or written.

    Raises:
        DeviceError: the compiler refused a part, crashed or took too long; the message names the part.
        ConfigError: the programs are not to be in blocks.
        UnsupportedModelError: a pass cannot lower the model.
    """
    target = job.target
    assert target is not None, "the job is for an NPU that is elsewhere"
    parts = list[CompiledForNPU]()

    def note(part: CompiledForNPU) -> None:
        parts.append(part)
        target.on_part(part)

    own = replace(job, target=replace(target, on_part=note))
    plan = own.kind.plan(own, for_blobs=True)
    with plan.weights.released():
        compiled = compile_all(plan, job.on_progress).compiled
    chains = {variant: chain for variant, chain in compiled.items() if isinstance(chain, CompiledChain)}
    return CompiledForReport(target.platform, target.compilers[0].version, plan, chains, tuple(parts))


def _schedule_of(part: CompiledForNPU) -> Schedule:
    assert part.program.schedule is not None, "the target asks for schedules"
    return part.program.schedule


def _described_part(part: CompiledForNPU) -> PartSchedule:
    schedule = _schedule_of(part)
    return PartSchedule(
        part.part.name,
        part.of,
        schedule.total,
        schedule.repriced,
        schedule.engines,
        schedule.num_dma_tasks,
        tuple(heaviest(schedule, MOST_KINDS)),
        schedule.layers[:MOST_LAYERS],
        _operations([part.part.model]),
        len(part.program.blob),
        part.program.seconds,
    )


def _operations(models: Sequence[ov.Model]) -> dict[str, int]:
    names = (node.get_type_name() for model in models for node in model.get_ops())
    return dict(Counter(name for name in names if name not in _FORMAL).most_common(MOST_OPERATIONS))


def _read_bytes(call: PlannedCall, chain: CompiledChain) -> int:
    """Return the bytes of the weights and KV slots that a call reads."""
    ports = {port.name: math.prod(port.shape) * port.element_type.bitwidth // 8 for port in chain.plan.inputs}
    entries = (chain.bank.entries[read.entry] for read in call.inputs if isinstance(read, EntryOf))
    names = (read.name for read in call.inputs if isinstance(read, OfPort))
    kv_bytes: int = sum(ports[name] for name in names if name.startswith("past."))
    return kv_bytes + sum(entry.data.nbytes for entry in entries)


def _counted(
    calls: Sequence[PlannedCall], numbers: Sequence[int], parts: Sequence[CompiledForNPU]
) -> Iterator[PartCalls]:
    """Yield the parts, whose ``numbers`` stand beside the calls, in the order of their first calls."""
    counts = Counter(numbers)
    first_repeated = next((place for place, number in enumerate(numbers) if counts[number] > 1), 0)
    for number, count in counts.items():
        place = numbers.index(number)
        role: Role = "block" if count > 1 else "head" if place < first_repeated else "tail"
        names = (target.name for target in calls[place].outputs if isinstance(target, OfPort))
        layers = {match[1] for match in map(_LAYER.match, names) if match}
        yield PartCalls(number, parts[number].part.name, count, role, len(layers))


def predicted_times(
    index: VariantIndex, seconds: Seconds, roof: Callable[[Any], float], longest_prompt: int
) -> PredictedTimes:
    """Return what a decoder takes if its calls take these seconds. Prompts run in the chunks that the engine would choose."""
    costs = CostModel(seconds)
    single = sorted(variant for variant in index.decoding if variant.rows == 1)
    tokens = [single[0], *(single[-1:] if len(single) > 1 else [])]
    return PredictedTimes(
        tuple(_prompt(index, costs, length) for length in sorted({min(SHORT_PROMPT, longest_prompt), longest_prompt})),
        tuple(TokenTime(each.kv_len, costs(each) * _MS, costs(each) / roof(each)) for each in tokens),
        _packed(index, costs, single),
    )


def _prompt(index: VariantIndex, costs: CostModel[Variant], length: int) -> PromptTime:
    chunks = [variant for variant, _ in plan_chunks(index, costs, length, 0, is_fresh=True)]
    return PromptTime(length, math.fsum(map(costs, chunks)) * _MS, tuple(map(str, chunks)))


def _packed(index: VariantIndex, costs: CostModel[Variant], single: Sequence[Variant]) -> PackedTime | None:
    """Return the step of most sequences over the shortest KV length, compared with that of one over no more slots."""
    shared = sorted(
        (variant for variant in index.decoding if variant.rows > 1), key=lambda each: (-each.rows, each.kv_len)
    )
    if not shared:
        return None
    packed = shared[0]
    one = next((each for each in reversed(single) if each.kv_len <= packed.kv_len), single[0])
    return PackedTime(packed.sequences, packed.kv_len, costs(packed) * _MS, costs(packed) / costs(one))


def unknown_of(platform: Platform, num_calls: int, is_repriced: bool) -> tuple[str, ...]:
    """Return what a schedule cannot say, as sentences of one line."""
    rate = platform.dma_bytes_per_us / 1e3
    price = "; it charges reads of 4-bit weights like 16-bit ones on this platform" if is_repriced else ""
    return (
        f"The times are predictions of the compiler's cost model, which reads {rate:.0f} GB/s whatever else runs{price}.",
        f"It knows nothing of the time of host and driver per call ({num_calls} per step), real bandwidth, clocks and power.",
    )

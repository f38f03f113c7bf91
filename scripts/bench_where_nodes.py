"""Divides the time of a call among the kinds of nodes that the plugin runs, by its own counters (``PERF_COUNT``)."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import openvino as ov

from staticllm.compiler_passes.compiling.chain import device_models
from staticllm.compiler_passes.compiling.compile import compile_all
from staticllm.compiler_passes.compiling.dry_run import bound_request, random_feeds
from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.devices import get_core, supported_properties
from staticllm.errors import ConfigError
from staticllm.model_files.model_at import check_model_dir
from staticllm.pipelines.diagnostics.settings import label_of
from staticllm.pipelines.loading.decoder_kind import DecoderPlan, prepare

RUNS = 5
PERF_COUNT = "PERF_COUNT"
KINDS = {
    "matrix products": ("FullyConnected", "LLMMLP", "QKVProjection"),
    "attention": ("MatMul", "Softmax", "ScaledDotProductAttention", "PagedAttention", "PagedAttentionExtension"),
    "transposes": ("Transpose",),
    "conversions": ("Convert", "Reorder"),
    "splits and joins": ("Split", "VariadicSplit", "Concat", "StridedSlice", "Slice"),
    "masks and repeats": ("Tile", "Broadcast", "Select"),
    "positions": ("RoPE", "Cos", "Sin"),
    "norms": ("RMS", "MVN", "NormalizeL2"),
    "embedding": ("Gather",),
}
"""Kinds of work, by prefixes of the plugin's node types; products with weights are ``FullyConnected``, and two
kinds of layers that the plugin fuses."""
ELEMENTWISE, OTHER = "elementwise", "other"
PASSIVE = ("Parameter", "Result", "Constant")
FUSED, ARITHMETIC = "Subgraph", ("Eltwise", "Math", "Multiply", "Add", "Subtract", "PowerStatic", "Swish")


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


def profile_calls(
    models_path: str | os.PathLike[str],
    device: str,
    config: StaticLLMConfig,
    calls: Sequence[Callable[[Sequence[Variant]], Variant]],
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> Iterator[CallProfile]:
    """Compile a model with counters and yield the profile of each call, on random tokens and KV slots.

    Each of ``calls`` chooses a variant among those of the pipeline. ``on_progress``: (calls profiled, all calls).

    Raises:
        ConfigError: the device has no counters; and what ``prepare`` raises.
    """
    plan = counting(prepare(check_model_dir(models_path, False), device, config))
    variants = tuple(dict.fromkeys(choose(plan.variants) for choose in calls))
    for number, variant in enumerate(variants):
        on_progress(number, len(variants))
        compiled = counted_program(plan, variant)
        feeds = random_feeds(compiled, variant)  # kept until the calls have run: a request only points at them
        times = times_after_first(bound_request(compiled, feeds))
        settings = label_of(get_core(), device, plan.options.program_group(variant).properties)
        kinds = kinds_in(compiled, plan.lowered.graph.model, times)
        yield CallProfile(str(variant), settings, sum(node.ms for node in times), shares_of(times, kinds))


def counting(plan: DecoderPlan) -> DecoderPlan:
    """Return a plan whose programs count; none runs in blocks.

    Raises:
        ConfigError: the device has no counters.
    """
    device = plan.options.device
    if PERF_COUNT not in supported_properties(get_core(), device):
        raise ConfigError(f"device {device!r} has no property {PERF_COUNT}: profile a device that counts, such as CPU")
    parts = {part: {**each, PERF_COUNT: True} for part, each in plan.options.properties.items()}
    layout = "separate" if plan.options.layout == "blocks" else plan.options.layout
    return replace(plan, options=replace(plan.options, properties=parts, layout=layout))


def counted_program(plan: DecoderPlan, variant: Variant) -> ov.CompiledModel:
    """Compile the program of a variant for it alone: counters add up over all runs of a program, whatever their sizes."""
    group = plan.options.program_group(variant)
    shared = (each for each in plan.variants if plan.options.program_group(each) == group)
    alike = shared if plan.options.mode == "shared" else (variant,)
    (compiled,) = device_models(compile_all(plan.restricted(alike)).compiled[variant])
    return compiled


def kinds_in(compiled: ov.CompiledModel, model: ov.Model, times: Iterable[NodeTime]) -> dict[str, str]:
    """Return the kind of work of each node that was counted, by its name. ``model``: what was compiled."""
    types = {node.get_friendly_name(): node.get_type_name() for node in model.get_ops()}
    fused = _fused(compiled)
    return {node.name: kind_of(node.type, [types.get(name, "") for name in fused.get(node.name, ())]) for node in times}


@dataclass(frozen=True)
class NodeTime:
    """One node of a compiled program: its name and type in the plugin, and the ms that it took."""

    name: str
    type: str
    ms: float


def decode_step(variants: Sequence[Variant]) -> Variant:
    """Choose a decode step of one sequence over the second KV length."""
    found = sorted(variant for variant in variants if variant.rows == 1)
    return found[min(1, len(found) - 1)]


def prompt_of(num_tokens: int) -> Callable[[Sequence[Variant]], Variant]:
    """Return a choice of the smallest call that holds a fresh prompt of ``num_tokens``, or else of the largest call."""

    def choose(variants: Sequence[Variant]) -> Variant:
        alone = [variant for variant in variants if variant.sequences == 1 and not variant.extra_logits]
        least = min(variant.kv_len for variant in alone if variant.rows > 1 or len(alone) == 1)
        fresh = sorted(variant for variant in alone if variant.kv_len == least)
        return next((variant for variant in fresh if variant.rows >= num_tokens), fresh[-1])

    return choose


def shares_of(times: Iterable[NodeTime], kinds: Mapping[str, str]) -> tuple[NodeShare, ...]:
    """Group the times of nodes by their kinds, which are keyed by the nodes' names; the longest kind comes first."""
    groups = defaultdict[str, list[NodeTime]](list)
    for node in times:
        if node.ms > 0:
            groups[kinds[node.name]].append(node)
    sums = {kind: sum(node.ms for node in nodes) for kind, nodes in groups.items()}
    total = sum(sums.values())
    return tuple(
        NodeShare(kind, tuple(sorted({node.type for node in groups[kind]})), len(groups[kind]), ms, ms / total)
        for kind, ms in sorted(sums.items(), key=lambda item: -item[1])
    )


def num_running(times: Iterable[NodeTime]) -> int:
    """Return how many of the nodes can take time; those of less than a microsecond count as 0 ms."""
    return sum(node.type not in PASSIVE for node in times)


def kind_of(node_type: str, fused: Collection[str] = ()) -> str:
    """Return the kind of work of a node. ``fused``: the types of the model's nodes that the plugin fused into it."""
    if node_type == FUSED:
        return "attention" if {"MatMul", "Softmax"} & set(fused) else ELEMENTWISE
    for kind, beginnings in KINDS.items():
        if node_type.startswith(beginnings):
            return kind
    return ELEMENTWISE if node_type.startswith(ARITHMETIC) else OTHER


def times_after_first(request: ov.InferRequest) -> list[NodeTime]:
    """Return the mean ms of each node over ``RUNS`` runs after the first, which packs the weights."""
    counted = CountedRuns(request)
    for _ in range(RUNS + 1):
        counted.run()
    return counted.times()


def run_step(request: ov.InferRequest) -> None:
    """Run a request as pipelines do, on a thread of the plugin; one that runs on this thread has other threads beside it."""
    request.start_async()
    request.wait()


class CountedRuns:
    """The runs of a request of a program with counters that has not run yet; the first one, which packs weights, is left out."""

    def __init__(self, request: ov.InferRequest, run: Callable[[ov.InferRequest], None] | None = None) -> None:
        self.request = request
        self._run = run or run_step
        self.seconds: list[float] = []
        """The seconds of the runs after the first."""
        self._first: dict[str, float] | None = None

    def run(self) -> float:
        """Run once, and return the seconds that it took."""
        start = time.perf_counter()
        self._run(self.request)
        seconds = time.perf_counter() - start
        if self._first is None:
            self._first = {entry.node_name: _ms(entry) for entry in self.request.profiling_info}
        else:
            self.seconds.append(seconds)
        return seconds

    def times(self) -> list[NodeTime]:
        """Return the mean ms of each node over the runs after the first."""
        assert self._first is not None and self.seconds, "it ran once at most"
        num_runs = len(self.seconds)
        times = list[NodeTime]()
        for entry in self.request.profiling_info:
            # the counters are means over all runs so far
            later = _ms(entry) * (num_runs + 1) - self._first.get(entry.node_name, 0.0)
            times.append(NodeTime(entry.node_name, entry.node_type, max(0.0, later) / num_runs))
        return times


def _ms(entry: ov.ProfilingInfo) -> float:
    return float(entry.real_time.total_seconds()) * 1e3


def _fused(compiled: ov.CompiledModel) -> dict[str, list[str]]:
    """Return the names of the model's nodes that the plugin fused into each of its nodes."""
    found = {}
    for node in compiled.get_runtime_model().get_ops():
        names = node.get_rt_info()["originalLayersNames"].astype(str)
        found[node.get_friendly_name()] = [name for name in names.split(",") if name]
    return found

"""Times parts of a model on this machine: its matrices with several device properties, and its first layers in two programs.

Matrices alone do not tell what a program for calls of few rows gains: with fixed rows, the CPU plugin prepares fewer nodes per
call, and fuses more of them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from staticllm.core import Part, ProgramLayout, Variant
from staticllm.devices import kind, type_name
from staticllm.system.long_calls import attended

from ..graph.step_graph import compressed_weights
from ..lower import LoweredModel
from .dry_run import bound_request, random_feeds

GROUP_SIZE, PRECISION = "DYNAMIC_QUANTIZATION_GROUP_SIZE", "INFERENCE_PRECISION_HINT"
LARGE_GROUP = 128
"""Activations per scale in the CPU's 8-bit multiplication by 8-bit or 4-bit weights. The plugin's default is 32."""
WORTH_IT = 1.1
"""Least speedup for which a larger group is used: it moves logits a little further from the model's (docs/decisions.md)."""
CLEARLY = 1.15
"""Least speedup of an unusual setting for single rows, whose probes vary by 5 % or more."""
NOT_SLOWER = 1.05
"""Measured slowdown up to which a setting counts as equally fast."""
PACKED_ROWS, SHORT_ROWS = 8, 16
"""Probed rows of a packed step and of a short prompt; a prompt of twice as many is probed as well."""
MANY_ROWS, LEAST_RUNS, SECONDS = 128, 3, 0.03
"""Probed rows of a long prompt; minimum runs and minimum seconds per candidate."""
TURN = (512, 64)
"""Tokens of a prompt and of an answer, for which one program is chosen."""
LEAST_WEIGHTS = 1_000_000
"""Weights in the probed matrices below which nothing is timed and activations are not quantized: gains would be noise, so the
setting, and with it the tokens, could change between starts, and the divergence is four times as large."""
CACHE_BYTES = 64 << 20
"""Bytes read before each timing of a single row, to evict the weights from the caches."""

LAYERS_SHARE, LEAST_LAYERS_SHARE = 1 / 6, 1 / 50
"""Largest and smallest share of a model's nodes in the timed layers."""
LAYER_RUNS = 25

Properties = Mapping[str, Any]
ProbeRequest = tuple[ov.InferRequest, dict[str, NDArray[Any]]]
"""A request, and the memory it reads."""


class ProbeTimes(Protocol):
    """The times of probes that ran on this machine before, by question: a text that names all that was timed."""

    def times(self, question: str, count: int) -> list[float] | None:
        """Return the seconds of the ``count`` candidates of a question, if they are known."""

    def add(self, question: str, seconds: Sequence[float]) -> None:
        """Add the seconds of a question's candidates."""


@dataclass(frozen=True)
class Tuning:
    """The properties of each part of a model.

    ``few_rows``: the most rows of a call of the part ``few_rows``. ``speedup``: how many times faster the matrices of these calls
    are than with the properties of other calls: those of a single row, or of a packed step if that gains more.
    """

    properties: dict[Part, Properties]
    few_rows: int = 1
    speedup: float = 1.0


def calibrated(
    core: ov.Core,
    device: str,
    model: ov.Model,
    phases: Mapping[Part, Properties],
    layout: ProgramLayout,
    kept: ProbeTimes | None = None,
) -> Tuning:
    """Return the properties of each part of ``model``: those in ``phases``, and those that a probe found to be faster.

    Properties that the user set are never changed. On the CPU a program with one matrix per shape in the model is timed with
    ``MANY_ROWS`` rows, with the plugin's own group size and with ``LARGE_GROUP``. Both phases get the same result, so that they
    can share a program. If calls of few rows may have a program of their own, its properties are chosen by ``_for_few_rows``.
    Small models do not quantize activations. Other devices are not probed. What is in ``kept`` is not timed again.
    """
    found = dict(phases)
    matrices = repeated_matrices(model) if kind(device) == "CPU" else []
    if not matrices:
        return Tuning(found)
    if _num_weights(matrices) < LEAST_WEIGHTS:
        first = Probe(core, device, matrices[:1])  # for both phases, so that equal properties are tried once
        if all(_runs_unquantized(core, device, first, properties) for properties in phases.values()):
            found.update({phase: {GROUP_SIZE: 0, **properties} for phase, properties in phases.items()})
        return Tuning(found)
    probe = Probe(core, device, matrices, kept)
    if not any(GROUP_SIZE in properties for properties in phases.values()) and probe.takes_large_groups:
        own = phases["prefill"]
        seconds, larger_seconds = probe.seconds(MANY_ROWS, [own, {**own, GROUP_SIZE: LARGE_GROUP}])
        if seconds >= WORTH_IT * larger_seconds:
            found.update({phase: {**properties, GROUP_SIZE: LARGE_GROUP} for phase, properties in phases.items()})
    if layout not in ("few_rows", "separate", "blocks"):
        return Tuning(found)
    few = _for_few_rows(probe, found["generate"], phases)
    found["few_rows"] = few.properties
    return Tuning(found, few.num_rows, few.speedup)


def for_all_rows(
    core: ov.Core,
    device: str,
    model: ov.Model,
    phases: Mapping[Part, Properties],
    kept: ProbeTimes | None = None,
    may_be_f32: bool = True,
) -> dict[Part, Properties]:
    """Return the properties of one program for all calls of ``model``: as ``calibrated``, or in f32 if that is faster.

    Where a processor computes in bf16 by default, 8-bit products in f32 may be faster for few rows, and slower for many. The
    probed matrices run as in a turn of ``TURN`` tokens.

    Args:
        phases: The user's properties of each phase.
        kept: Times that need not be measured again.
        may_be_f32: Whether f32 may be chosen.
    """
    found = calibrated(core, device, model, phases, "paged", kept).properties
    own = phases["generate"]
    matrices = repeated_matrices(model)
    is_open = may_be_f32 and phases["prefill"] == own and not {GROUP_SIZE, PRECISION} & own.keys()
    if not is_open or _num_weights(matrices) < LEAST_WEIGHTS:
        return found
    probe = Probe(core, device, matrices, kept)
    if probe.is_f32 or not probe.takes_large_groups:
        return found
    candidates = [found["generate"], {**own, GROUP_SIZE: LARGE_GROUP, PRECISION: "f32"}]
    usual, exact = (
        prompt * TURN[0] / MANY_ROWS + token * TURN[1]
        for prompt, token in zip(
            probe.seconds(MANY_ROWS, candidates), probe.seconds(1, candidates, is_cold=True), strict=True
        )
    )
    return {part: dict(candidates[1]) for part in phases} if exact * NOT_SLOWER < usual else found


@dataclass(frozen=True)
class FewRows:
    """The fastest properties for calls of few rows, the most rows for which they are used, and what they gain."""

    properties: Properties
    num_rows: int = 1
    speedup: float = 1.0


def _for_few_rows(probe: Probe, usual: Properties, asked: Mapping[Part, Properties]) -> FewRows:
    """Return the fastest properties for calls of few rows. ``asked``: the user's own of each phase, which are not changed.

    For single rows the candidates are activations without quantization, the same in f32, and ``usual``. The first is nearest to
    the model, so ``usual``, which all other calls have, must be faster, and f32 clearly faster. Where the device computes in
    bf16, quantized activations in f32 are tried as well, because they reach the integer units with less work around them. They
    also serve packed steps and short prompts if they are clearly faster there and single rows do not suffer.
    """
    own = asked["generate"]
    if GROUP_SIZE in own:
        return FewRows(usual)
    plain = {**usual, GROUP_SIZE: 0}
    exact = {**usual, GROUP_SIZE: 0, PRECISION: "f32"}
    quantized = {**usual, GROUP_SIZE: LARGE_GROUP, PRECISION: "f32"}
    is_f32_open = PRECISION not in own and not probe.is_f32
    can_share = is_f32_open and probe.takes_large_groups and asked["prefill"] == own
    candidates = [plain, usual, *([exact] if is_f32_open else []), *([quantized] if can_share else [])]
    seconds = probe.seconds(1, candidates, is_cold=True)
    if can_share:
        limit = min(seconds[:-1]) * NOT_SLOWER
        packed = probe.seconds(PACKED_ROWS, [usual, quantized], is_cold=True)
        if seconds[-1] <= limit and packed[0] >= CLEARLY * packed[1]:
            prompt = probe.seconds(2 * SHORT_ROWS, [usual, quantized], is_cold=True)
            num_rows = 2 * SHORT_ROWS if prompt[1] <= NOT_SLOWER * prompt[0] else SHORT_ROWS
            return FewRows(quantized, num_rows, max(seconds[1] / seconds[-1], packed[0] / packed[1]))
    best = min(range(len(candidates) - can_share), key=seconds.__getitem__)
    best = best if seconds[0] >= (NOT_SLOWER if best == 1 else CLEARLY) * seconds[best] else 0
    return FewRows(candidates[best], 1, seconds[1] / seconds[best])


def repeated_matrices(model: ov.Model) -> list[ov.Node]:
    """Return one MatMul per shape of compressed matrices that occurs more than once, so none of the head."""
    nodes = [node for node in model.get_ordered_ops() if compressed_weights(node) is not None]
    shapes = [tuple(node.input_value(1).get_shape()) for node in nodes]
    counts = Counter(shapes)
    return list({shape: node for shape, node in zip(shapes, nodes, strict=True) if counts[shape] > 1}.values())


def _runs_unquantized(core: ov.Core, device: str, probe: Probe, properties: Properties) -> bool:
    """Whether ``probe`` runs without quantized activations. In bf16 it depends on the processor's instructions."""
    precision = type_name(properties.get(PRECISION) or core.get_property(device, PRECISION))
    if precision != "bf16":
        return precision == "f32"
    return probe.can_run({**properties, GROUP_SIZE: 0})


def _num_weights(matrices: Sequence[ov.Node]) -> int:
    return sum(math.prod(node.input_value(1).get_shape()) for node in matrices)


class Probe:
    """Some matrices of a model in one program, which is compiled once per set of properties."""

    def __init__(self, core: ov.Core, device: str, matrices: list[ov.Node], kept: ProbeTimes | None = None) -> None:
        self._core = core
        self._device = device
        self._kept = kept
        self._described = [_description(node) for node in matrices]
        self._sizes = [_input_size(node) for node in matrices]
        self._model = _side_by_side(matrices, self._sizes)
        self.requests: dict[str, ov.InferRequest] = {}

    @property
    def is_f32(self) -> bool:
        """Whether the device computes in f32 by default."""
        return bool(self._core.get_property(self._device, PRECISION).get_type_name() == "f32")

    @property
    def takes_large_groups(self) -> bool:
        """Whether every matrix can be divided into large groups."""
        return not any(size % LARGE_GROUP for size in self._sizes)

    def can_run(self, properties: Properties) -> bool:
        """Whether the device runs the matrices with these properties."""
        try:
            zeros = [np.zeros((1, 1, size), np.float32) for size in self._sizes]
            attended(partial(self.request_of(properties).infer, zeros))
        except RuntimeError:
            return False
        return True

    def seconds(self, num_rows: int, candidates: list[Properties], is_cold: bool = False) -> list[float]:
        """Return the seconds of the shortest run of each candidate; they run in turn. ``is_cold``: no cache holds the weights."""
        described = [sorted((name, str(value)) for name, value in properties.items()) for properties in candidates]
        question = repr((self._device, self._described, num_rows, is_cold, described))
        found = self._kept.times(question, len(candidates)) if self._kept is not None else None
        if found is None:
            found = self.timed(num_rows, candidates, is_cold)
            if self._kept is not None:
                self._kept.add(question, found)
        return found

    def timed(self, num_rows: int, candidates: list[Properties], is_cold: bool) -> list[float]:
        """Time each candidate that computes other numbers than those before it; equal ones run the same kernels and share a time.

        Quantized activations are equal to others where the processor lacks instructions. If all are equal, each time is 1.
        """
        random = np.random.default_rng(0)
        scratch = np.ones(CACHE_BYTES // 8 if is_cold else 0, np.int64)
        feeds = [random.standard_normal((1, num_rows, size)).astype(np.float32) for size in self._sizes]
        requests = [self.request_of(properties) for properties in candidates]
        products = [_infer(request, feeds) for request in requests]
        first_alike = [next(i for i, other in enumerate(products) if _are_equal(other, found)) for found in products]
        if not any(first_alike):
            return [1.0] * len(candidates)
        timed = {index: list[float]() for index in first_alike}
        until = time.perf_counter() + SECONDS * len(timed)
        while len(timed[0]) < LEAST_RUNS or time.perf_counter() < until:
            for index, taken in timed.items():
                np.bitwise_or.reduce(scratch)
                start = time.perf_counter()
                requests[index].infer()
                taken.append(time.perf_counter() - start)
        return [min(timed[index]) for index in first_alike]

    def request_of(self, properties: Properties) -> ov.InferRequest:
        key = repr(sorted(properties.items()))
        if key not in self.requests:
            compiled = attended(partial(self._core.compile_model, self._model, self._device, dict(properties)))
            self.requests[key] = compiled.create_infer_request()
        return self.requests[key]


def _infer(request: ov.InferRequest, feeds: list[NDArray[np.float32]]) -> list[NDArray[Any]]:
    return [np.array(found) for found in attended(partial(request.infer, feeds)).values()]


def _are_equal(one: Sequence[NDArray[np.generic]], other: Sequence[NDArray[np.generic]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def _description(node: ov.Node) -> tuple[Any, ...]:
    """Return the types and the shape of the multiplied values of a matrix product."""
    weights = compressed_weights(node)
    stored = (weights.get_element_type().to_string(), tuple(weights.get_shape())) if weights is not None else None
    shape = tuple(node.input_value(1).get_shape())
    return node.input_value(0).get_element_type().to_string(), stored, shape, bool(node.get_attributes()["transpose_b"])


def _input_size(node: ov.Node) -> int:
    shape = node.input_value(1).get_shape()
    is_transposed = node.get_attributes()["transpose_b"]
    return int(shape[1] if is_transposed else shape[0])


def _side_by_side(matrices: list[ov.Node], sizes: list[int]) -> ov.Model:
    inputs = []
    results = []
    for node, size in zip(matrices, sizes, strict=True):
        rows = ops.parameter([1, -1, size], node.input_value(0).get_element_type())
        product = ops.matmul(rows, node.input_value(1), False, bool(node.get_attributes()["transpose_b"]))
        inputs.append(rows)
        results.append(ops.result(product))
    return ov.Model(results, inputs)  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs


@dataclass(frozen=True)
class ProbedProgram:
    """A program of a probe: the variants that share it, and its properties."""

    variants: tuple[Variant, ...]
    properties: Properties


def layers_speedup(
    core: ov.Core,
    device: str,
    lowered: LoweredModel,
    variant: Variant,
    programs: tuple[ProbedProgram, ProbedProgram],
    kept: ProbeTimes | None = None,
) -> float:
    """Return how many times faster calls of ``variant`` are in the second of two programs, as estimated.

    The first layers of the model run in both forms, in turns and with cold caches. 1.0 if the model has no layers that can be
    told apart. What is in ``kept`` is not timed again.

    Raises:
        RuntimeError: the device refused a program.
    """
    models = [first_layers(lowered.share(program.variants), LAYERS_SHARE) for program in programs]
    parts = [model for model in models if model is not None]
    if len(parts) < len(programs):
        return 1.0
    kinds = Counter(node.get_type_name() for node in parts[0].get_ordered_ops())
    shapes = [
        (tuple(node.shape), str(node.get_element_type())) for node in parts[0].get_ordered_ops() if _is_matrix(node)
    ]
    settings = [sorted((name, str(value)) for name, value in program.properties.items()) for program in programs]
    question = repr(
        (device, str(variant), sorted(kinds.items()), shapes, settings, [len(each.variants) for each in programs])
    )
    seconds = kept.times(question, len(programs)) if kept is not None else None
    if seconds is None:
        compiled = [
            attended(partial(core.compile_model, part, device, dict(program.properties)))
            for part, program in zip(parts, programs, strict=True)
        ]
        seconds = seconds_in_turns([_warm_request(each, variant) for each in compiled])
        if kept is not None:
            kept.add(question, seconds)
    return seconds[0] / seconds[1]


def seconds_in_turns(requests: Sequence[ProbeRequest]) -> list[float]:
    times: list[list[float]] = [[] for _ in requests]
    scratch = np.ones(CACHE_BYTES // 8, np.int64)
    for _ in range(LAYER_RUNS):
        for (request, _), taken in zip(requests, times, strict=True):
            np.bitwise_or.reduce(scratch)
            start = time.perf_counter()
            request.infer()
            taken.append(time.perf_counter() - start)
    return [float(np.median(taken)) for taken in times]


def first_layers(model: ov.Model, most: float) -> ov.Model | None:
    """Return the part of a model that computes its first outputs, usually keys and values of the first layers.

    It has at most the share ``most`` of the model's nodes; None if no outputs need that few, or those need too few.
    """
    nodes = model.get_ordered_ops()
    places = {node.get_name(): place for place, node in enumerate(nodes)}
    needed = list[int]()  # of each node: the nodes that it needs, as bits
    for node in nodes:
        producers = (places[value.get_node().get_name()] for value in node.input_values())
        bits = 0 if node.get_type_name() == "Constant" else 1 << len(needed)
        for producer in producers:
            bits |= needed[producer]
        needed.append(bits)
    total = max(bits.bit_count() for bits in needed)
    chosen = list[ov.Node]()
    bits = 0
    for result in sorted(model.get_results(), key=lambda each: needed[places[each.get_name()]].bit_count()):
        more = bits | needed[places[result.get_name()]]
        if more.bit_count() > most * total:
            break
        chosen.append(result)
        bits = more
    if bits.bit_count() < LEAST_LAYERS_SHARE * total:
        return None
    inputs = [each for each in model.get_parameters() if bits >> places[each.get_name()] & 1]
    return ov.Model(chosen, inputs)  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs


def _is_matrix(node: ov.Node) -> bool:
    return node.get_type_name() == "Constant" and len(node.shape) > 1


def _warm_request(compiled: ov.CompiledModel, variant: Variant) -> ProbeRequest:
    """Return a request that has run once at ``variant``, so that its weights are packed, and the memory that it reads."""
    feeds = random_feeds(compiled, variant)
    request = bound_request(compiled, feeds)
    attended(request.infer)
    return request, feeds

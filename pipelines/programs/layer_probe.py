"""Times the first layers of a model in the shared program's form and in that of a program for calls of few rows.

Matrices alone (autotune.py) do not tell what a program of its own gains: with fixed rows, the plugin prepares fewer nodes for
each call, and fuses more of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.compiler_passes.lower import LoweredModel
from staticllm.core import Variant
from staticllm.pipelines.programs.autotune import CACHE_BYTES, ProbeTimes, Properties
from staticllm.pipelines.programs.dry_run import bound_request, random_feeds

LAYERS_SHARE, LEAST_SHARE = 1 / 6, 1 / 50
"""The part of a model's nodes that is timed at most, and at least."""
RUNS = 25

BoundRequest = tuple[ov.InferRequest, dict[str, NDArray[Any]]]
"""A request, and the memory that it reads."""


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
            core.compile_model(part, device, dict(program.properties))
            for part, program in zip(parts, programs, strict=True)
        ]
        seconds = _seconds_in_turns([_request(each, variant) for each in compiled])
        if kept is not None:
            kept.add(question, seconds)
    return seconds[0] / seconds[1]


def _seconds_in_turns(requests: Sequence[BoundRequest]) -> list[float]:
    times: list[list[float]] = [[] for _ in requests]
    scratch = np.ones(CACHE_BYTES // 8, np.int64)
    for _ in range(RUNS):
        for (request, _), taken in zip(requests, times, strict=True):
            np.bitwise_or.reduce(scratch)
            start = time.perf_counter()
            request.infer()
            taken.append(time.perf_counter() - start)
    return [float(np.median(taken)) for taken in times]


def first_layers(model: ov.Model, most: float) -> ov.Model | None:
    """Return the part of a model that computes its first outputs, usually keys and values of the first layers.

    It has at most the share ``most`` of the model's nodes; None if no outputs need so few, or only hardly any.
    """
    nodes = model.get_ordered_ops()
    places = {node.get_name(): place for place, node in enumerate(nodes)}
    needed = list[int]()  # of each node: the nodes that it needs, as bits
    for node in nodes:
        sources = (places[value.get_node().get_name()] for value in node.input_values())
        bits = 0 if node.get_type_name() == "Constant" else 1 << len(needed)
        for source in sources:
            bits |= needed[source]
        needed.append(bits)
    total = max(bits.bit_count() for bits in needed)
    chosen, bits = list[ov.Node](), 0
    for result in sorted(model.get_results(), key=lambda each: needed[places[each.get_name()]].bit_count()):
        more = bits | needed[places[result.get_name()]]
        if more.bit_count() > most * total:
            break
        chosen.append(result)
        bits = more
    if bits.bit_count() < LEAST_SHARE * total:
        return None
    inputs = [each for each in model.get_parameters() if bits >> places[each.get_name()] & 1]
    return ov.Model(chosen, inputs)  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs


def _is_matrix(node: ov.Node) -> bool:
    return node.get_type_name() == "Constant" and len(node.shape) > 1


def _request(compiled: ov.CompiledModel, variant: Variant) -> BoundRequest:
    """Return a request that has run once at ``variant``, so that its weights are packed, and the memory that it reads."""
    feeds = random_feeds(compiled, variant)
    request = bound_request(compiled, feeds)
    request.infer()
    return request, feeds

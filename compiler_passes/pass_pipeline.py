"""Runs a pass pipeline, a list of named passes in their order, with a check after each pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from staticllm.compiler_passes.graph.check_graph import check_graph
from staticllm.compiler_passes.graph.step_graph import StepGraph
from staticllm.core import KVType


@dataclass(frozen=True)
class LoweringOptions:
    """The options of the passes.

    ``max_kv_len``: the largest KV length of any variant. ``kv_type``: the element type of the KV slots.
    """

    max_kv_len: int
    kv_type: KVType = "f32"


@dataclass(frozen=True)
class Pass:
    """A named entry of a pipeline. ``run`` changes the graph in place and adds a note of what it matched."""

    name: str
    run: Callable[[StepGraph, LoweringOptions], None]


@dataclass(frozen=True)
class PassReport:
    """The effect of one pass, for ``staticllm inspect``."""

    name: str
    nodes_before: int
    nodes_after: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PassPipeline:
    """Passes in the order in which they run. A kind of model, or a device, that needs other passes has its own pipeline."""

    passes: tuple[Pass, ...]

    def without(self, name: str) -> PassPipeline:
        """Return the pipeline without the pass of this name.

        Raises:
            ValueError: the pipeline has no such pass.
        """
        if name not in (entry.name for entry in self.passes):
            raise ValueError(f"the pipeline has no pass {name!r}")
        return PassPipeline(tuple(entry for entry in self.passes if entry.name != name))

    def run(self, graph: StepGraph, options: LoweringOptions) -> tuple[PassReport, ...]:
        """Run every pass on ``graph``, which is changed in place, and check the graph after each.

        Raises:
            UnsupportedModelError: a pass cannot lower the graph; the message names the pass and the node.
        """
        reports: list[PassReport] = []
        before = len(graph.model.get_ops())
        for entry in self.passes:
            entry.run(graph, options)
            after = check_graph(graph, entry.name)
            reports.append(PassReport(entry.name, before, after, tuple(graph.notes.get(entry.name, ()))))
            before = after
        return tuple(reports)

"""Runs a pass pipeline, a list of named passes in their order, with a check after each pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import openvino as ov

from staticllm.core import AdapterLayout, AdapterType, KVType, Variant
from staticllm.errors import StaticLLMError, UnsupportedModelError
from staticllm.system.long_calls import checkpoint

from .graph.check_graph import check_graph
from .graph.step_graph import StepGraph
from .shapes.add_pooling import Dense

Graph = TypeVar("Graph", bound=StepGraph)
Options = TypeVar("Options")


@dataclass(frozen=True)
class LoweringOptions:
    """The options of the passes."""

    max_len: int
    """The most tokens of a sequence."""
    kv_type: KVType = "f32"
    """The element type of the KV slots."""
    narrows_attention: bool = False
    """Whether attention over pages computes in bf16, where the rest computes in f32."""
    is_normalised: bool = True
    """Whether embeddings have length 1, if the model's head is cut."""
    adapters: tuple[AdapterLayout, ...] = ()
    """The shapes of adapters that become inputs."""
    adapter_type: AdapterType = "f32"
    """The element type of those inputs."""
    cross_window_len: int = 0
    """The frames of a window of cross-attention."""
    num_cross_windows: int = 0
    """How many windows its inputs hold."""


@dataclass(frozen=True)
class EncoderOptions:
    """The options of the passes of an encoder. ``dense`` and ``is_normalised`` do not concern cross-encoders."""

    max_rows: int = 512
    """The most rows of any variant."""
    dense: tuple[Dense, ...] = ()
    """Dense modules after pooling."""
    is_normalised: bool = True
    """Whether embeddings have length 1."""
    score_tokens: tuple[int, ...] = ()
    """The tokens whose logits are the scores, for a causal language model that ranks texts."""


@dataclass(frozen=True)
class Pass(Generic[Graph, Options]):
    """A named entry of a pipeline."""

    name: str
    run: Callable[[Graph, Options], None]
    """Changes the graph in place and adds a note of what it matched."""


@dataclass(frozen=True)
class VariantPass(Generic[Graph]):
    """A named pass that depends on the sizes of a program, so it runs on the model of each variant that it ``applies`` to."""

    name: str
    applies: Callable[[Variant], bool]
    run: Callable[[Graph, ov.Model], int]
    """Changes the model, whose shapes are static, in place, and returns the number of places that it changed."""


@dataclass(frozen=True)
class PassReport:
    """The effect of one pass, for ``staticllm inspect``."""

    name: str
    nodes_before: int
    nodes_after: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PassPipeline(Generic[Graph, Options]):
    """Passes in the order in which they run. A kind of model, or a device, that needs other passes has its own pipeline."""

    passes: tuple[Pass[Graph, Options], ...]
    variant_passes: tuple[VariantPass[Graph], ...] = ()
    """Run later, on the model of one variant."""

    def without(self, name: str) -> PassPipeline[Graph, Options]:
        """Return the pipeline without the pass of this name, which may be one of its variants.

        Raises:
            ValueError: the pipeline has no such pass.
        """
        later = tuple(entry for entry in self.variant_passes if entry.name != name)
        if len(later) == len(self.variant_passes):
            self._require(name)
        passes = tuple(entry for entry in self.passes if entry.name != name)
        return replace(self, passes=passes, variant_passes=later)

    def replace(self, name: str, other: Pass[Graph, Options]) -> PassPipeline[Graph, Options]:
        """Return the pipeline with ``other`` in place of the pass of this name.

        Raises:
            ValueError: the pipeline has no such pass.
        """
        self._require(name)
        return replace(self, passes=tuple(other if entry.name == name else entry for entry in self.passes))

    def after(self, name: str, other: Pass[Graph, Options]) -> PassPipeline[Graph, Options]:
        """Return the pipeline with ``other`` after the pass of this name.

        Raises:
            ValueError: the pipeline has no such pass.
        """
        self._require(name)
        passes = tuple(each for entry in self.passes for each in ((entry, other) if entry.name == name else (entry,)))
        return replace(self, passes=passes)

    def _require(self, name: str) -> None:
        if name not in (entry.name for entry in self.passes):
            raise ValueError(f"the pipeline has no pass {name!r}")

    def run(self, graph: Graph, options: Options) -> tuple[PassReport, ...]:
        """Run every pass on ``graph``, which is changed in place, and check the graph after each.

        Raises:
            UnsupportedModelError: a pass cannot lower the graph; the message names the pass and the node.
        """
        reports: list[PassReport] = []
        before = len(graph.model.get_ops())
        for entry in self.passes:
            after = _run(entry, graph, options)
            reports.append(PassReport(entry.name, before, after, tuple(graph.notes.get(entry.name, ()))))
            before = after
        return tuple(reports)


def run_variant_passes(entries: Iterable[VariantPass[Graph]], graph: Graph, model: ov.Model, variant: Variant) -> None:
    """Run the passes that apply to a variant on its ``model``, which is changed in place.

    Raises:
        UnsupportedModelError: a pass cannot change the model; the message names the pass and the node.
    """
    for entry in entries:
        if entry.applies(variant):
            with _named(entry.name):
                entry.run(graph, model)


def _run(entry: Pass[Graph, Options], graph: Graph, options: Options) -> int:
    """Run one pass and the check after it. Return the number of nodes."""
    checkpoint()
    with _named(entry.name):
        entry.run(graph, options)
    return check_graph(graph, entry.name)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Name the pass in which OpenVINO raises an error."""
    try:
        yield
    except StaticLLMError:
        raise
    except RuntimeError as error:  # of OpenVINO, whose last line says what is wrong
        what = (str(error).strip().splitlines() or ["no reason given"])[-1][:300]
        raise UnsupportedModelError(name, f"OpenVINO cannot evaluate a part of the graph: {what}") from error

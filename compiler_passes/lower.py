"""Runs the list of passes, which is the whole compiler in its order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import openvino as ov

from staticllm.compiler_passes.graph.check_graph import check_graph, check_static
from staticllm.compiler_passes.graph.step_graph import StepGraph
from staticllm.compiler_passes.inputs.expose_mask import expose_mask
from staticllm.compiler_passes.inputs.expose_positions import expose_positions
from staticllm.compiler_passes.rewrites.decompose_attention import decompose_attention
from staticllm.compiler_passes.rewrites.group_queries import group_queries
from staticllm.compiler_passes.rewrites.merge_projections import merge_projections
from staticllm.compiler_passes.shapes.fix_shapes import bound_shapes, fix_shapes
from staticllm.compiler_passes.shapes.select_logits import select_logits
from staticllm.compiler_passes.states.fix_cache_position import fix_cache_position
from staticllm.compiler_passes.states.keep_new_rows import keep_new_rows
from staticllm.compiler_passes.states.lift_state import lift_state
from staticllm.compiler_passes.states.store_kv_as import store_kv_as
from staticllm.core import KEY_POSITIONS, KVType, ModelShape, Variant
from staticllm.errors import UnsupportedModelError
from staticllm.ports import LOGITS, POSITION_IDS, input_names


@dataclass(frozen=True)
class LoweringOptions:
    """The options of the passes.

    ``max_kv_len``: the largest KV length of any variant. ``kv_type``: the element type of the KV slots. ``merges_projections``:
    whether small projections are merged, which helps if each matrix costs more time than that of reading it.
    """

    max_kv_len: int
    kv_type: KVType = "f32"
    merges_projections: bool = False


@dataclass(frozen=True)
class Pass:
    """A named entry of the list. ``run`` changes the graph in place and adds a note of what it matched."""

    name: str
    run: Callable[[StepGraph, LoweringOptions], None]


PASSES: tuple[Pass, ...] = (
    Pass("lift_state", lambda graph, options: lift_state(graph)),
    Pass("keep_new_rows", lambda graph, options: keep_new_rows(graph)),
    Pass("fix_cache_position", lambda graph, options: fix_cache_position(graph)),
    Pass("expose_mask", lambda graph, options: expose_mask(graph, options.max_kv_len)),
    Pass("expose_positions", lambda graph, options: expose_positions(graph, options.max_kv_len)),
    Pass("select_logits", lambda graph, options: select_logits(graph)),
    Pass("group_queries", lambda graph, options: group_queries(graph)),
    Pass("decompose_attention", lambda graph, options: decompose_attention(graph)),
    Pass("merge_projections", lambda graph, options: merge_projections(graph) if options.merges_projections else None),
    Pass("store_kv_as", lambda graph, options: store_kv_as(graph, options.kv_type)),
)


@dataclass(frozen=True)
class PassReport:
    """The effect of one pass, for ``staticllm inspect``."""

    name: str
    nodes_before: int
    nodes_after: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class LoweredModel:
    """A model after all passes but the last, with any number of rows and KV length. ``specialise`` and ``share`` finish it."""

    graph: StepGraph
    shape: ModelShape
    reports: tuple[PassReport, ...]

    def specialise(self, variant: Variant, is_static: bool = True) -> ov.Model:
        """Return the model of one variant's program. ``is_static``: check that every shape in it is static."""
        model = fix_shapes(self.graph, variant)
        if is_static:
            check_static(model, f"fix_shapes{variant}")
        return model

    def share(self, variants: tuple[Variant, ...]) -> ov.Model:
        """Return the model of one program for all ``variants``, with bounded dynamic rows and KV length."""
        return bound_shapes(self.graph, variants)


def lower(model: ov.Model, options: LoweringOptions) -> LoweredModel:
    """Run the list on a stateful model, which is changed in place.

    Raises:
        UnsupportedModelError: a pass cannot lower the graph; the message names the pass and the node.
    """
    graph = StepGraph(model)
    reports = []
    for entry in PASSES:
        before = len(model.get_ordered_ops())
        entry.run(graph, options)
        check_graph(graph, entry.name)
        notes = tuple(graph.notes.get(entry.name, ()))
        reports.append(PassReport(entry.name, before, len(model.get_ordered_ops()), notes))
    return LoweredModel(graph, _shape_of(graph), tuple(reports))


def _shape_of(graph: StepGraph) -> ModelShape:
    position_ids = graph.parameter(POSITION_IDS)
    dims = list(position_ids.get_partial_shape()) if position_ids is not None else []
    vocab = graph.model.output(LOGITS).get_partial_shape()[2]
    if vocab.is_dynamic:
        raise UnsupportedModelError("select_logits", "the vocabulary size of the logits is not known")
    copies = dims[0].get_length() if len(dims) == 3 else 1
    has_distances = graph.parameter(KEY_POSITIONS) is not None
    shape = ModelShape(
        tuple(graph.kv_states),
        tuple(graph.masks),
        vocab.get_length(),
        len(dims),
        copies,
        is_packable=graph.is_packable and not graph.recurrent_states,
        has_distances=has_distances,
        recurrent_states=tuple(graph.recurrent_states),
        max_rows=graph.max_rows,
    )
    known = input_names(shape)
    for port in graph.model.inputs:
        if port.get_any_name() not in known:
            raise UnsupportedModelError(
                "lower", f"the input {port.get_any_name()!r} is unknown: nothing can be fed to it"
            )
    return shape

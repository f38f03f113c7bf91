"""Lowers a model: runs a pipeline of passes on it, reads its ports, and sets its sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import openvino as ov

from staticllm.core import KEY_POSITIONS, ModelShape, Variant
from staticllm.errors import UnsupportedModelError
from staticllm.ports import EMBEDDINGS, LOGITS, POSITION_IDS, input_names

from .decoder import DECODER, PAGED, PAGED_FORMS, PAGED_PROOFS, with_adapters
from .graph.check_graph import check_inputs, check_static
from .graph.paged_graph import PagedGraph
from .graph.step_graph import StepGraph
from .pass_pipeline import (
    LoweringOptions,
    PassPipeline,
    PassReport,
    VariantPass,
    run_variant_passes,
)
from .shapes.fix_shapes import bound_shapes, fix_shapes

Proof = Literal["before compiling", "beside compiling", "known", "failed"]
"""When the first layers of a graph in pages are compared with those of the original; of ``known`` and ``failed`` the result is
there."""


@dataclass(frozen=True)
class LoweredModel:
    """A model after its passes, with any number of rows and KV length. ``specialise`` and ``share`` set its sizes."""

    graph: StepGraph
    shape: ModelShape
    reports: tuple[PassReport, ...]
    variant_passes: tuple[VariantPass[StepGraph], ...] = ()
    proof: Callable[[], object] | None = None
    """Compares the graph with the model, unless that was done; raises ``UnsupportedModelError`` if they differ."""

    def specialise(self, variant: Variant, is_static: bool = True) -> ov.Model:
        """Return the model of one variant's program, after the passes of its sizes.

        Args:
            is_static: Whether to check before them that every shape in it is static.

        Raises:
            UnsupportedModelError: one is not.
        """
        model = fix_shapes(self.graph, variant)
        if is_static:
            check_static(model, "fix_shapes", str(variant))
        run_variant_passes(self.variant_passes, self.graph, model, variant)
        return model

    def share(self, variants: tuple[Variant, ...]) -> ov.Model:
        """Return the model of one program for all ``variants``, with bounded dynamic rows and KV length."""
        return bound_shapes(self.graph, variants)


def lower(
    model: ov.Model, options: LoweringOptions, passes: PassPipeline[StepGraph, LoweringOptions] = DECODER
) -> LoweredModel:
    """Run ``passes`` on a model, which is changed in place, and read the ports of the result.

    Raises:
        UnsupportedModelError: a pass cannot lower the graph; the message names the pass and the node.
    """
    graph = StepGraph(model)
    reports = passes.run(graph, options)
    return LoweredModel(graph, _shape_of(graph), reports, passes.variant_passes)


def lower_paged(model: ov.Model, options: LoweringOptions, proof: Proof = "before compiling") -> LoweredModel:
    """Lower a copy of a model to a program over pages of KV slots.

    Args:
        proof: When the result is compared with the model: now, by the ``proof`` of what is returned, or not again.

    Raises:
        UnsupportedModelError: it is not taken, or its numbers differ from the model's.
    """
    graph = PagedGraph(model.clone(), original=model)
    reports = PAGED.run(graph, options)
    prove: Callable[[], tuple[PassReport, ...]] | None = None
    if proof == "before compiling":
        reports += PAGED_PROOFS.run(PagedGraph(graph.model.clone(), original=model), options)
    elif proof == "beside compiling":
        prove = partial(PAGED_PROOFS.run, PagedGraph(graph.model.clone(), original=model), options)
    reports += (with_adapters(PAGED_FORMS) if options.adapters else PAGED_FORMS).run(graph, options)
    return LoweredModel(graph, _shape_of(graph), reports, proof=prove)


def _shape_of(graph: StepGraph) -> ModelShape:
    position_ids = graph.parameter(POSITION_IDS)
    dims = list(position_ids.get_partial_shape()) if position_ids is not None else []
    has_head = any(LOGITS in port.get_names() for port in graph.model.outputs)
    vocab = graph.model.output(LOGITS if has_head else EMBEDDINGS).get_partial_shape()[2]
    if vocab.is_dynamic:
        raise UnsupportedModelError("select_logits", "the vocabulary size of the logits is not known")
    rank = 2 if graph.page_size and len(dims) == 1 else len(dims)  # the positions of one call are flat there
    copies = dims[0].get_length() if len(dims) == 3 else 1
    has_distances = graph.parameter(KEY_POSITIONS) is not None
    shape = ModelShape(
        tuple(graph.kv_states),
        tuple(graph.masks),
        vocab.get_length(),
        rank,
        copies,
        is_packable=graph.is_packable and not graph.recurrent_states,
        has_distances=has_distances,
        recurrent_states=tuple(graph.recurrent_states),
        max_rows=graph.max_rows,
        num_adapters=graph.num_adapters,
        adapted=tuple(graph.adapted),
        adapter_type=graph.adapter_type,
        cross_states=tuple(graph.cross_states),
        cross_window_len=graph.cross_window_len,
        num_cross_windows=graph.num_cross_windows,
        rope_limits=graph.rope_limits,
        page_size=graph.page_size,
    )
    check_inputs(graph.model, input_names(shape), "lower")
    return shape

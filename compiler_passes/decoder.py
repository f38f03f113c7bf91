"""Lists the passes of a causal language model in their order, which are the whole compiler of its step programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from staticllm.devices import kind, merges_projections

from .graph.paged_graph import PagedGraph
from .graph.step_graph import StepGraph
from .inputs.expose_factors import expose_factors
from .inputs.expose_mask import expose_mask
from .inputs.expose_positions import expose_positions
from .inputs.prove_pages import prove_pages
from .inputs.prove_rows import prove_rows
from .npu_forms import NPU_FORMS
from .pass_pipeline import LoweringOptions, Pass, PassPipeline, VariantPass
from .rewrites.cut_heads import cut_heads
from .rewrites.decompose_attention import decompose_attention
from .rewrites.expose_adapters import expose_adapters
from .rewrites.group_queries import group_queries
from .rewrites.join_weights import join_weights
from .rewrites.mend_broadcasts import mend_broadcasts
from .rewrites.merge_joined import merge_joined
from .rewrites.merge_projections import merge_projections
from .rewrites.narrow_attention import narrow_attention
from .rewrites.sign_sine import sign_sine
from .rewrites.write_by_select import write_by_select
from .shapes.cut_head import cut_head
from .shapes.select_logits import select_logits
from .states.fix_cache_position import fix_cache_position
from .states.keep_new_rows import keep_new_rows
from .states.lift_state import lift_state
from .states.page_attention import page_attention
from .states.store_kv_as import store_kv_as

G = TypeVar("G", bound=StepGraph)
DECODER: PassPipeline[StepGraph, LoweringOptions] = PassPipeline(
    (
        Pass(
            "lift_state", lambda graph, options: lift_state(graph, options.cross_window_len, options.num_cross_windows)
        ),
        Pass("mend_broadcasts", lambda graph, options: mend_broadcasts(graph)),
        Pass("keep_new_rows", lambda graph, options: keep_new_rows(graph)),
        Pass("fix_cache_position", lambda graph, options: fix_cache_position(graph)),
        Pass("expose_mask", lambda graph, options: expose_mask(graph, options.max_len)),
        Pass("expose_positions", lambda graph, options: expose_positions(graph, options.max_len)),
        Pass("expose_factors", lambda graph, options: expose_factors(graph, options.max_len)),
        Pass("prove_rows", lambda graph, options: prove_rows(graph, options.max_len)),
        Pass("select_logits", lambda graph, options: select_logits(graph)),
        Pass("group_queries", lambda graph, options: group_queries(graph)),
        Pass("decompose_attention", lambda graph, options: decompose_attention(graph)),
        Pass("merge_projections", lambda graph, options: merge_projections(graph)),
        Pass("store_kv_as", lambda graph, options: store_kv_as(graph, options.kv_type)),
    )
)
"""Lowers a stateful model to a pure function. The sizes of a variant are set afterwards, by ``LoweredModel``."""
PAGED: PassPipeline[PagedGraph, LoweringOptions] = PassPipeline(
    (Pass("page_attention", lambda graph, options: page_attention(graph, options.kv_type, options.max_len)),)
)
"""Lowers a stateful model to a function over pages, for the CPU. Where it cannot, ``DECODER`` can."""
PAGED_PROOFS: PassPipeline[PagedGraph, LoweringOptions] = PassPipeline(
    (
        Pass("prove_rows", lambda graph, options: prove_rows(graph, options.max_len)),
        Pass("prove_pages", lambda graph, options: prove_pages(graph)),
    )
)
"""Compares what ``PAGED`` has made with the model, and changes neither."""
PAGED_FORMS: PassPipeline[PagedGraph, LoweringOptions] = PassPipeline(
    (
        Pass("narrow_attention", lambda graph, options: narrow_attention(graph, options.narrows_attention)),
        Pass("select_logits", lambda graph, options: select_logits(graph)),
        Pass("merge_projections", lambda graph, options: merge_projections(graph)),
    )
)
"""Gives what ``PAGED`` has made the form that is fast."""
DECODER_UNMERGED = DECODER.without("merge_projections")
"""The same for devices on which merged projections are not faster."""
DECODER_EMBEDDER = DECODER.replace(
    "select_logits", Pass("cut_head", lambda graph, options: cut_head(graph, options.is_normalised))
)
"""Lowers a stateful model whose hidden states are wanted, not its logits: an embedder that is exported with KV slots."""


def _form(name: str, run: Callable[[StepGraph], None]) -> Pass[StepGraph, LoweringOptions]:
    """Return a pass without options."""
    return Pass(name, lambda graph, options: run(graph))


WIDE_PLATFORMS = ("4000", "5010")
FEW_ROWS = 1
"""Most rows for which merged projections and signed sines are faster on an NPU (docs/npu.md)."""
DECODER_NPU: PassPipeline[StepGraph, LoweringOptions] = PassPipeline(
    (
        *DECODER_UNMERGED.without("group_queries").without("store_kv_as").passes,
        *(_form(name, run) for name, run in NPU_FORMS),
        Pass("join_weights", lambda graph, options: join_weights(graph)),
        Pass("store_kv_as", lambda graph, options: store_kv_as(graph, options.kv_type)),
    ),
    (
        VariantPass("merge_joined", lambda variant: variant.rows <= FEW_ROWS, merge_joined),
        VariantPass("sign_sine", lambda variant: variant.rows <= FEW_ROWS, sign_sine),
        VariantPass("cut_heads", lambda variant: variant.rows > 1, cut_heads),
        VariantPass("write_by_select", lambda variant: True, write_by_select),
    ),
)
"""The same in forms that Intel's NPU compiler makes fast programs of. Each choice is a row of a table in ``docs/npu.md``."""
DECODER_NPU_WIDE = DECODER_NPU.without("gate_last").without("cut_heads")
"""The same for platforms with more tiles than the oldest one, where prompts are faster without these two."""


def decoder_passes(device: str, platform: str = "") -> PassPipeline[StepGraph, LoweringOptions]:
    """Return the passes for a device, such as ``CPU`` or ``GPU.0``, by its kind.

    Args:
        platform: The platform of an NPU, such as ``4000``. Programs for an unknown one have the forms that every platform
            takes.
    """
    if kind(device) == "NPU":
        return DECODER_NPU_WIDE if platform in WIDE_PLATFORMS else DECODER_NPU
    return DECODER if merges_projections(device) else DECODER_UNMERGED


def with_adapters(passes: PassPipeline[G, LoweringOptions]) -> PassPipeline[G, LoweringOptions]:
    """Return the pipeline for a model that is loaded with adapters. Layers are found by their names, so before any are merged."""
    return passes.after(
        "select_logits",
        Pass("expose_adapters", lambda graph, options: expose_adapters(graph, options.adapters, options.adapter_type)),
    )

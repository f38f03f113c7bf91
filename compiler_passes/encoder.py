"""Lists the passes of a text encoder in their order, which are the whole compiler of its packed programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from staticllm.devices import kind

from .graph.encoder_graph import EncoderGraph
from .inputs.check_places import check_places
from .inputs.expose_encoder_mask import expose_encoder_mask
from .inputs.expose_encoder_positions import expose_encoder_positions
from .inputs.expose_past import expose_past
from .inputs.fix_encoder_inputs import fix_encoder_inputs
from .inputs.prove_packing import prove_packing
from .inputs.prove_past import prove_past
from .npu_forms import NPU_FORMS
from .pass_pipeline import EncoderOptions, Pass, PassPipeline
from .rewrites.decompose_attention import decompose_attention
from .shapes.add_pooling import add_pooling
from .shapes.pool_scores import pool_scores
from .shapes.select_output import select_output
from .states.drop_past import drop_past

ENCODER: PassPipeline[EncoderGraph, EncoderOptions] = PassPipeline(
    (
        Pass("drop_past", lambda graph, options: drop_past(graph)),
        Pass("select_output", lambda graph, options: select_output(graph, options.score_tokens)),
        Pass("fix_encoder_inputs", lambda graph, options: fix_encoder_inputs(graph)),
        Pass("expose_encoder_mask", lambda graph, options: expose_encoder_mask(graph)),
        Pass("expose_encoder_positions", lambda graph, options: expose_encoder_positions(graph)),
        Pass("pool_scores", lambda graph, options: pool_scores(graph)),
        Pass("check_places", lambda graph, options: check_places(graph)),
        Pass("decompose_attention", lambda graph, options: decompose_attention(graph)),
        Pass("prove_packing", lambda graph, options: prove_packing(graph)),
        Pass("prove_past", lambda graph, options: prove_past(graph)),
        Pass("add_pooling", lambda graph, options: add_pooling(graph, options.dense, options.is_normalised)),
        Pass("expose_past", lambda graph, options: expose_past(graph)),
    )
)
"""Lowers an encoder to a pure function of packed texts. ``LoweredEncoder`` sets the sizes of a variant afterwards."""


def _in_both(run: Callable[[EncoderGraph], None]) -> Callable[[EncoderGraph, EncoderOptions], None]:
    """Return what runs a rewrite on an encoder, and on its form that continues texts if it has one."""

    def run_both(graph: EncoderGraph, options: EncoderOptions) -> None:
        del options
        run(graph)
        if graph.continued is not None:
            run(replace(graph, model=graph.continued, notes={}))

    return run_both


ENCODER_NPU: PassPipeline[EncoderGraph, EncoderOptions] = PassPipeline(
    (
        *ENCODER.passes,
        *(Pass(name, _in_both(run)) for name, run in NPU_FORMS),
    )
)
"""The same in forms that Intel's NPU compiler makes fast programs of (docs/npu.md).

The rewrites come last, because what they round is not the original's. Heads are not cut: that is slower here, and no platform
needs it.
"""


def encoder_passes(device: str) -> PassPipeline[EncoderGraph, EncoderOptions]:
    """Return the passes for a device, such as ``CPU`` or ``GPU.0``, by its kind."""
    return ENCODER_NPU if kind(device) == "NPU" else ENCODER

"""Lowers an encoder: runs its passes, reads the ports of the result, and sets its sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import openvino as ov

from staticllm.core import EncoderShape, EncoderVariant
from staticllm.errors import UnsupportedModelError
from staticllm.ports import (
    EMBEDDINGS,
    PAST,
    POSITION_IDS,
    SCORES,
    TOKEN_TYPE_IDS,
    EncoderSizes,
    encoder_input_names,
    find_encoder_port,
)

from .encoder import ENCODER
from .graph.check_graph import check_inputs, check_static
from .graph.encoder_graph import EncoderGraph
from .graph.step_graph import sized
from .pass_pipeline import EncoderOptions, PassPipeline, PassReport


@dataclass(frozen=True)
class LoweredEncoder:
    """An encoder after its passes, with any batch, rows and texts. ``specialise`` and ``share`` set its sizes."""

    model: ov.Model
    shape: EncoderShape
    reports: tuple[PassReport, ...]
    reasons: tuple[str, ...] = ()
    """Why texts cannot share a sequence; empty if they can."""
    continued: ov.Model | None = None
    """Its form with ports for earlier rows, if it has one, for the variants that continue a text."""

    def specialise(self, variant: EncoderVariant, is_static: bool = True) -> ov.Model:
        """Return the model of one variant's program.

        As many rows as heads are refused: with both sizes static, OpenVINO 2026.4's CPU plugin computes wrong values in some
        models (``tests/cpu/passes/test_encoders.py``).

        Args:
            is_static: Whether to check that every shape in it is static.

        Raises:
            ValueError: the variant has more rows than the model allows, or as many as it has heads.
        """
        if variant.rows in self.shape.unsafe_rows:
            raise ValueError(f"{variant} has as many rows as the model has heads: choose another number of rows")
        model = self._sized((variant,), EncoderSizes.of(variant))
        if is_static:
            check_static(model, "fix_shapes", str(variant))
        return model

    def share(self, variants: tuple[EncoderVariant, ...]) -> ov.Model:
        """Return the model of one program for all ``variants``, with bounded dynamic sizes.

        If all variants have the same number of rows, and as many heads, the rows stay dynamic (see ``specialise``).

        Raises:
            ValueError: a variant has more rows than the model allows.
        """
        sizes = EncoderSizes.of(*variants)
        least, most = sizes.rows
        if least == most and most in self.shape.unsafe_rows:
            sizes = replace(
                sizes, rows=(least, most + 1), tokens=(sizes.tokens[0], sizes.tokens[1] // most * (most + 1))
            )
        return self._sized(variants, sizes)

    def _sized(self, variants: tuple[EncoderVariant, ...], sizes: EncoderSizes) -> ov.Model:
        longest = max(variants, key=lambda variant: variant.rows)
        if longest.rows > self.shape.max_rows:
            raise ValueError(f"{longest} has more rows than the {self.shape.max_rows} that the model was lowered for")
        is_continued = any(variant.past for variant in variants)
        if is_continued and self.continued is None:
            raise ValueError(f"{longest} continues a text, which the model does not allow")
        model = (self.continued if is_continued and self.continued is not None else self.model).clone()
        shapes = {}
        for port in model.inputs:
            contract = find_encoder_port(port.get_any_name())
            assert contract is not None
            shapes[port] = sized(port.get_partial_shape(), contract, sizes)
        model.reshape(shapes)
        return model


def lower_encoder(
    model: ov.Model,
    options: EncoderOptions | None = None,
    passes: PassPipeline[EncoderGraph, EncoderOptions] = ENCODER,
) -> LoweredEncoder:
    """Run ``passes`` on an encoder, which is changed in place, and read the ports of the result.

    Raises:
        UnsupportedModelError: a pass cannot lower the graph; the message names the pass and the node.
    """
    options = options or EncoderOptions()
    graph = EncoderGraph(model, max_rows=options.max_rows, original=model.clone())
    reports = passes.run(graph, options)
    return LoweredEncoder(graph.model, _shape_of(graph), reports, tuple(graph.reasons), graph.continued)


def _shape_of(graph: EncoderGraph) -> EncoderShape:
    output = graph.model.output(SCORES if graph.has_scores else EMBEDDINGS)
    width = output.get_partial_shape()[1]
    if width.is_dynamic:
        raise UnsupportedModelError("lower_encoder", f"the size of the output {output.get_any_name()!r} is not known")
    shape = EncoderShape(
        "scores" if graph.has_scores else "embeddings",
        width.get_length(),
        tuple(graph.encoder_masks),
        graph.num_rows,
        pooling=graph.pooling,
        has_positions=graph.parameter(POSITION_IDS) is not None,
        first_position=graph.first_position,
        has_token_types=graph.parameter(TOKEN_TYPE_IDS) is not None,
        is_packable=graph.is_packable,
        is_batchable=graph.is_batchable,
        unsafe_rows=tuple(sorted({*graph.query_heads} - {0})),
        head=graph.head,
        shares_prefixes=graph.shares_prefixes,
        skipped_id=graph.skipped_id,
        past=_past_of(graph.continued),
    )
    check_inputs(graph.model, encoder_input_names(shape), "lower_encoder")
    return shape


def _past_of(continued: ov.Model | None) -> tuple[tuple[int, int], ...]:
    """Return the heads and head size of each past port, in the order of their numbers; none without such a form."""
    if continued is None:
        return ()
    ports = {port.get_any_name(): port.get_partial_shape() for port in continued.inputs}
    shapes = [ports[f"{PAST}{index}"] for index in range(sum(name.startswith(PAST) for name in ports))]
    return tuple((shape[1].get_length(), shape[3].get_length()) for shape in shapes)

"""Gives the inputs of an encoder that programs do not have their only value: a mask of ones, and token types of 0.

Programs hide other texts by their masks, so ``attention_mask`` says nothing more. The token types of a single text are all 0; a
cross-encoder tells the query from the text by them, so there they stay an input.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.errors import UnsupportedModelError
from staticllm.ports import ATTENTION_MASK, INPUT_IDS, POSITION_IDS, TOKEN_TYPE_IDS

from ..graph.control_values import PROBE_BATCH, PROBE_ROWS, at_sizes
from ..graph.encoder_graph import EncoderGraph
from ..graph.step_graph import consumers, is_live, redirect

STAGE = "fix_encoder_inputs"
KNOWN = (INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS, POSITION_IDS)


def fix_encoder_inputs(graph: EncoderGraph) -> None:
    """Replace ``attention_mask`` by ones and ``token_type_ids`` by zeros, unless a cross-encoder needs them.

    Raises:
        UnsupportedModelError: an input is unknown or is not ``[batch, rows]``, or the model runs only at sizes of its own.
    """
    for port in graph.model.inputs:
        if not port.get_names() & set(KNOWN):
            raise UnsupportedModelError(
                STAGE, f"the input {port.get_any_name()!r} is unknown: nothing can be fed to it"
            )
        if port.get_partial_shape().rank != ov.Dimension(2):
            shape = port.get_partial_shape()
            raise UnsupportedModelError(
                STAGE, f"the input {port.get_any_name()!r} has the shape {shape}: must be [B, S]"
            )
    ids = graph.parameter(INPUT_IDS)
    if ids is None:
        raise UnsupportedModelError(STAGE, f"the model has no input {INPUT_IDS!r}")
    _free_sizes(graph)
    _widen(graph)
    if (mask := graph.parameter(ATTENTION_MASK)) is not None:
        _fix(graph, mask, _filled(1, mask, ids))
    if (types := graph.parameter(TOKEN_TYPE_IDS)) is not None and not (graph.has_scores and _matters(types)):
        _fix(graph, types, _zero(types, ids))
    for name in (TOKEN_TYPE_IDS, POSITION_IDS):
        parameter = graph.parameter(name)
        if parameter is not None and not is_live(graph.model, parameter):
            graph.model.remove_parameter(parameter)
            graph.note(STAGE, f"{name} is not used")
    graph.model.validate_nodes_and_infer_types()


def _free_sizes(graph: EncoderGraph) -> None:
    """Let the model, and the copy of what was exported, have any batch and any number of rows."""
    for parameter in (*graph.model.get_parameters(), *graph.original.get_parameters()):
        parameter.set_partial_shape(ov.PartialShape([-1, -1]))
    try:
        graph.model.validate_nodes_and_infer_types()
        graph.original.validate_nodes_and_infer_types()
        for rows in PROBE_ROWS:
            at_sizes(graph.model, PROBE_BATCH, rows)
    except RuntimeError as error:
        what = str(error).strip().splitlines()[-1][:200]
        raise UnsupportedModelError(
            STAGE, f"the model has fixed sizes: export it with a dynamic batch and sequence length ({what})"
        ) from None


def _widen(graph: EncoderGraph) -> None:
    """Let all inputs be i64, which programs are fed with; where the model has another type, it is converted."""
    for parameter in graph.model.get_parameters():
        own = parameter.get_element_type()
        if own != ov.Type.i64:
            readers = list(parameter.output(0).get_target_inputs())
            parameter.set_element_type(ov.Type.i64)
            converted = ops.convert(parameter, own).output(0)
            for reader in readers:
                reader.replace_source_output(converted)
            graph.note(STAGE, f"{parameter.output(0).get_any_name()} was {own.get_type_name()}")
    graph.model.validate_nodes_and_infer_types()


def _fix(graph: EncoderGraph, parameter: ov.Node, value: ov.Output) -> None:
    name = parameter.output(0).get_any_name()
    redirect(parameter.output(0), value)
    graph.model.remove_parameter(parameter)
    graph.note(STAGE, f"{name} is constant")


def _filled(number: int, parameter: ov.Node, ids: ov.Node) -> ov.Output:
    one = ops.constant(np.full((), number, parameter.get_element_type().to_dtype()))
    return ops.broadcast(one, ops.shape_of(ids)).output(0)


def _zero(types: ov.Node, ids: ov.Node) -> ov.Output:
    """Return a zero for each token, or a single one if all readers look up a vector that is broadcast to all tokens."""
    lookups = list(_lookups(types.output(0)))
    added = [reader for lookup in lookups for reader in (consumers(lookup.output(0)) if lookup else [None])]
    if all(reader is not None and reader.get_type_name() == "Add" for reader in added):
        return ops.constant(np.zeros((1, 1), types.get_element_type().to_dtype())).output(0)
    return _filled(0, types, ids)


def _lookups(output: ov.Output) -> Iterator[ov.Node | None]:
    """Yield the Gather nodes that use an output as an index, and None for any other reader."""
    for target in output.get_target_inputs():
        node = target.get_node()
        if node.get_type_name() == "Convert":
            yield from _lookups(node.output(0))
        else:
            yield node if node.get_type_name() == "Gather" and target.get_index() == 1 else None


def _matters(types: ov.Node) -> bool:
    """Return whether token types other than 0 exist: some reader is not the lookup in a table of one row."""
    tables = [lookup and lookup.input_value(0).get_partial_shape()[0] for lookup in _lookups(types.output(0))]
    return any(table is None or table != ov.Dimension(1) for table in tables)

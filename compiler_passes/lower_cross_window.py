"""Lowers the encoder of an encoder-decoder model, together with the keys and values that its decoder computes of each window.

The decoder's cross-attention sees nothing of a window but these. So one program makes them of the window, and what the encoder
computes in between never leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.core import CrossWindowShape, CrossWindowVariant, KVState, KVType
from staticllm.errors import UnsupportedModelError

from .graph.check_graph import check_static
from .graph.step_graph import StepGraph, named_result, redirect
from .pass_pipeline import PassReport
from .states.lift_cross import cross_model_of_outputs, lift_cross
from .states.store_kv_as import ELEMENT_TYPES, cross_type

STAGE = "lower_cross_window"
S = TypeVar("S")


@dataclass(frozen=True)
class LoweredForOneWindow(Generic[S]):
    """A model of fixed sizes of which a call has one window."""

    model: ov.Model
    shape: S
    stage: str
    """Named in errors."""
    reports: tuple[PassReport, ...] = ()

    def specialise(self, variant: CrossWindowVariant, is_static: bool = True) -> ov.Model:
        """Return the model of one variant's program.

        Args:
            is_static: Whether to check that every shape in it is static.
        """
        model = self.model.clone()
        if is_static:
            check_static(model, self.stage, str(variant))
        return model

    def share(self, variants: tuple[CrossWindowVariant, ...]) -> ov.Model:
        """Return the model of one program for all ``variants``, of which there is one."""
        return self.specialise(min(variants))


def lower_cross_window(encoder: ov.Model, decoder: ov.Model, kv_type: KVType) -> LoweredForOneWindow[CrossWindowShape]:
    """Join an encoder and what its decoder computes of a window once; both models are changed.

    The keys and values of cross-attention are the outputs.

    Raises:
        UnsupportedModelError: the encoder's input has no fixed size, or the decoder has no cross-attention to its output.
    """
    bands, columns = _fixed_input(encoder)
    _hand_over(encoder)
    hidden = encoder.outputs[0].get_node().input_value(0)
    length = encoder.outputs[0].get_partial_shape()[1]
    if length.is_dynamic:
        raise UnsupportedModelError(STAGE, "the encoder's output has no fixed number of frames")
    cross_model, found = _cross_model_of(decoder, length.get_length())
    model = _joined(encoder, hidden, cross_model)
    states = tuple(replace(state, kv_type=cross_type(kv_type)) for state in found)
    results = [_result(model, state) for state in states]
    joined = ov.Model(results, encoder.get_parameters(), "cross_window")  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs
    joined.validate_nodes_and_infer_types()
    shape = CrossWindowShape(bands, columns, length.get_length(), states)
    return LoweredForOneWindow(joined.clone(), shape, STAGE)


def _hand_over(encoder: ov.Model) -> None:
    """Let a node that changes nothing read the features: in blocks it is the host's part, as the lookup of tokens is in others.

    Plugins remove it.
    """
    (features,) = encoder.inputs
    readers = list(features.get_target_inputs())
    same = ops.multiply(features.get_node(), ops.constant(np.ones(1, np.float32))).output(0)
    for reader in readers:
        reader.replace_source_output(same)


def _cross_model_of(decoder: ov.Model, length: int) -> tuple[ov.Model, list[KVState]]:
    """Return what a decoder computes of one window, and its states; of an export with or without state."""
    found = None if decoder.get_sinks() else cross_model_of_outputs(decoder)
    if found is not None:
        return found
    graph = StepGraph(decoder)
    lift_cross(graph, length, 1)
    if graph.cross_model is None:
        raise UnsupportedModelError(STAGE, "the decoder has no cross-attention to an encoder's output")
    return graph.cross_model, graph.cross_states


def _fixed_input(encoder: ov.Model) -> tuple[int, int]:
    """Set the batch of the only input to 1, and return its bands and columns."""
    if len(encoder.inputs) != 1 or len(encoder.inputs[0].get_partial_shape()) != 3:
        shapes = [str(port.get_partial_shape()) for port in encoder.inputs]
        raise UnsupportedModelError(STAGE, f"the encoder has the inputs {shapes}: must be one, [batch, bands, columns]")
    shape = encoder.inputs[0].get_partial_shape()
    if shape[1].is_dynamic or shape[2].is_dynamic:
        raise UnsupportedModelError(STAGE, f"the encoder's input has shape {shape}: bands and columns must be known")
    shape[0] = 1
    encoder.reshape(shape)
    return shape[1].get_length(), shape[2].get_length()


def _joined(encoder: ov.Model, hidden: ov.Output, cross_model: ov.Model) -> ov.Model:
    """Let ``cross_model`` read the encoder's output, and return it."""
    (parameter,) = cross_model.get_parameters() if len(cross_model.get_parameters()) == 1 else (None,)
    if parameter is None or not parameter.get_partial_shape().compatible(hidden.get_partial_shape()):
        found = [str(each.get_partial_shape()) for each in cross_model.get_parameters()]
        raise UnsupportedModelError(
            STAGE,
            f"cross-attention reads inputs of shape {found}, the encoder's output is {hidden.get_partial_shape()}",
        )
    value = hidden
    if hidden.get_element_type() != parameter.get_element_type():
        value = ops.convert(hidden, parameter.get_element_type().get_type_name()).output(0)
    redirect(parameter.output(0), value)
    return cross_model


def _result(cross_model: ov.Model, state: KVState) -> ov.Node:
    """Return a new result for a state, of its type."""
    value = cross_model.output(state.past_name).get_node().input_value(0)
    wanted = ELEMENT_TYPES[state.kv_type]
    if value.get_element_type() != wanted:
        value = ops.convert(value, wanted.get_type_name()).output(0)
    return named_result(state.past_name, value)

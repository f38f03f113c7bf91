"""What each layer may see becomes an input.

The mask subgraph of each attention is *evaluated* on probe inputs and classified: causal, a window of N, or other. Layers
of one kind then share one input ``mask.<kind>`` of shape ``[1, 1, S, T+S]``, additive, and ``attention_mask`` goes.
Evaluation, not pattern matching, because exporters build the same mask in a dozen ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from staticllm.compiler_passes.graph import StepGraph, is_live, upstream
from staticllm.core import MaskKind
from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError

STAGE = "expose_mask"
MASK_PORT = 3
VISIBLE, HIDDEN_BELOW = 0.0, -1e4
"""An additive mask adds exactly 0 where a token is seen and less than this where it is hidden."""


@dataclass(frozen=True)
class Probe:
    """One evaluation of the mask subgraphs: ``past`` rows, ``new`` tokens."""

    past: int
    new: int


def expose_mask(graph: StepGraph, capacity: int) -> None:
    """Classify the mask of every layer and feed it from outside.

    A window that is not shorter than ``capacity`` plus a few rows can never hide anything and counts as causal.
    """
    attentions = graph.attentions()
    if not attentions:
        raise UnsupportedModelError(STAGE, "the model has no ScaledDotProductAttention: not a language model?")
    sources = [_mask_source(node) for node in attentions]
    kinds = _classify(graph.model, sources, capacity)
    inputs: dict[MaskKind, ov.Node] = {}
    for node, source in zip(attentions, sources, strict=True):
        kind = kinds[_key(source)]
        if kind not in inputs:
            inputs[kind] = _mask_input(graph, kind, node.get_output_partial_shape(0)[2])
        node.input(MASK_PORT).replace_source_output(_cast(inputs[kind], node.input_value(0).get_element_type()))
        graph.layer_masks.append(kind.label)
        heads = node.input_value(0).get_partial_shape()[1]
        graph.query_heads.append(heads.get_length() if heads.is_static else 0)
    graph.masks = sorted(inputs, key=lambda kind: kind.window or 0)
    graph.model.validate_nodes_and_infer_types()
    _drop_attention_mask(graph)
    labels = ", ".join(f"{kind.label} in {graph.layer_masks.count(kind.label)}" for kind in graph.masks)
    graph.note(STAGE, f"{labels} of {len(attentions)} layers")


def _mask_source(attention: ov.Node) -> ov.Output:
    if attention.get_input_size() <= MASK_PORT:
        raise UnsupportedModelError(STAGE, f"attention {attention.get_friendly_name()!r} has no mask input")
    return attention.input_value(MASK_PORT)


def _key(output: ov.Output) -> tuple[int, int]:
    return output.get_node().get_instance_id(), output.get_index()


def _classify(model: ov.Model, sources: list[ov.Output], capacity: int) -> dict[tuple[int, int], MaskKind]:
    unique = {_key(source): source for source in sources}
    probes = [Probe(0, 7), Probe(3, 4), Probe(capacity, 5), Probe(capacity + 3, 1)]
    evaluate = _evaluator(model, list(unique.values()))
    values = [evaluate(probe) for probe in probes]
    kinds = {}
    for index, (key, source) in enumerate(unique.items()):
        masks = [value[index] for value in values]
        kinds[key] = _kind_of(probes, masks, source.get_node().get_friendly_name())
    return kinds


def _evaluator(model: ov.Model, sources: list[ov.Output]) -> Callable[[Probe], list[NDArray[np.float32]]]:
    """Compile only what the masks need, on the CPU, and return a function from a probe to their values."""
    needed = {node.get_instance_id() for node in upstream([source.get_node() for source in sources])}
    parameters = [node for node in model.get_parameters() if node.get_instance_id() in needed]
    results = [ops.result(source) for source in sources]
    masks = ov.Model(results, parameters)  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs
    compiled = get_core().compile_model(masks, "CPU")

    def evaluate(probe: Probe) -> list[NDArray[np.float32]]:
        feeds = [_probe_input(node, probe) for node in parameters]
        return [_additive(value) for value in compiled(feeds).values()]

    return evaluate


def _probe_input(parameter: ov.Node, probe: Probe) -> NDArray[np.generic]:
    """What one parameter holds when ``past`` rows are cached and ``new`` tokens arrive. All tokens are real."""
    names = parameter.output(0).get_names()
    shape = parameter.get_partial_shape()
    dtype = parameter.get_element_type().to_dtype()
    if "attention_mask" in names:
        return np.ones((1, probe.past + probe.new), dtype)
    if "position_ids" in names:
        positions = np.arange(probe.past, probe.past + probe.new, dtype=dtype)
        return np.broadcast_to(positions, [*(d.get_length() for d in list(shape)[:-1]), probe.new]).copy()
    tokens = probe.new if "input_ids" in names or "inputs_embeds" in names else probe.past
    return np.zeros([d.get_length() if d.is_static else tokens for d in shape], dtype)


def _additive(value: NDArray[np.generic]) -> NDArray[np.float32]:
    if value.dtype == np.bool_:
        return np.where(value, VISIBLE, -np.inf).astype(np.float32)
    return np.asarray(value, np.float32)


def _kind_of(probes: list[Probe], masks: list[NDArray[np.float32]], where: str) -> MaskKind:
    window = _window_of(masks[2])
    for probe, mask in zip(probes, masks, strict=True):
        expected = visible_cells(probe.past, probe.new, window)
        visible, hidden = mask == VISIBLE, mask < HIDDEN_BELOW
        plane = mask.size == expected.size
        if not plane or not np.array_equal(visible.reshape(expected.shape), expected) or not np.all(visible | hidden):
            raise UnsupportedModelError(
                STAGE,
                f"the mask {where!r} is neither causal nor a window (evaluated with {probe.past} past and {probe.new} new "
                f"tokens, shape {list(mask.shape)}): biases such as ALiBi are not supported yet",
            )
    return MaskKind(window)


def _window_of(mask: NDArray[np.float32]) -> int | None:
    """The window that the last row of a long probe shows, None if it sees everything."""
    last = np.atleast_2d(mask.reshape(-1, mask.shape[-1]))[-1]
    seen = int(np.count_nonzero(last == VISIBLE))
    return None if seen in (0, last.size) else seen


def visible_cells(past: int, new: int, window: int | None) -> NDArray[np.bool_]:
    """Plain definition of visibility, ``[new, past + new]``: token q sees k if k <= q and k > q - window."""
    query = np.arange(past, past + new)[:, None]
    key = np.arange(past + new)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _mask_input(graph: StepGraph, kind: MaskKind, rows: ov.Dimension) -> ov.Node:
    return graph.add_parameter(kind.port_name, ov.PartialShape([1, 1, rows, -1]), ov.Type.f32)


def _cast(mask: ov.Node, element_type: ov.Type) -> ov.Output:
    same = mask.get_element_type() == element_type
    return mask.output(0) if same else ops.convert(mask, element_type.get_type_name()).output(0)


def _drop_attention_mask(graph: StepGraph) -> None:
    parameter = graph.parameter("attention_mask")
    if parameter is None:
        return
    if is_live(graph.model, parameter):
        readers = sorted({target.get_node().get_friendly_name() for target in parameter.output(0).get_target_inputs()})
        raise UnsupportedModelError(
            STAGE, f"attention_mask is read beside the attention masks (by {readers[0]!r}): not supported yet"
        )
    graph.model.remove_parameter(parameter)

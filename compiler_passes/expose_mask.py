"""What each layer may see becomes an input.

The mask subgraph of each attention is *evaluated* on probe inputs and classified: causal, a window of N, or other. Layers
of one kind then share one input ``mask.<kind>`` of shape ``[1, 1, S, T+S]``, additive.
Evaluation, not pattern matching, because exporters build the same mask in a dozen ways.

Where the visible cells hold a bias that is linear in the key's position, with a slope for each head (ALiBi), the bias is
rebuilt from two more inputs, the positions of keys and queries: arena rows lie in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from staticllm.compiler_passes.graph import StepGraph, upstream
from staticllm.core import KEY_POSITIONS, QUERY_POSITIONS, MaskKind
from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError

STAGE = "expose_mask"
MASK_PORT = 3
VISIBLE, HIDDEN_BELOW = 0.0, -1e4
"""An additive mask adds exactly 0 where a token is seen, or a bias, and less than this where it is hidden."""
BIAS_TOLERANCE = 1e-5  # of the largest bias: exporters compute it in f32


@dataclass(frozen=True)
class Seen:
    """What the mask of a layer does: who is seen, and ``slopes`` of a linear bias, one a head; none if there is no bias."""

    kind: MaskKind
    slopes: tuple[float, ...] = ()


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
        if not graph.recurrent_states:
            raise UnsupportedModelError(STAGE, "the model has no ScaledDotProductAttention: not a language model?")
        graph.note(STAGE, "no attention: nothing to mask")
        return
    sources = [_mask_source(node) for node in attentions]
    found = _classify(graph.model, sources, capacity)
    inputs: dict[MaskKind, ov.Node] = {}
    biased: dict[Seen, ov.Output] = {}
    for node, source in zip(attentions, sources, strict=True):
        seen = found[_key(source)]
        rows = node.get_output_partial_shape(0)[2]
        if seen.kind not in inputs:
            inputs[seen.kind] = _mask_input(graph, seen.kind, rows)
        if seen not in biased:
            mask = _cast(inputs[seen.kind], node.input_value(0).get_element_type())
            biased[seen] = _with_bias(graph, mask, seen.slopes, rows) if seen.slopes else mask
        node.input(MASK_PORT).replace_source_output(biased[seen])
        graph.layer_masks.append(seen.kind.label + (" + ALiBi" if seen.slopes else ""))
        heads = node.input_value(0).get_partial_shape()[1]
        graph.query_heads.append(heads.get_length() if heads.is_static else 0)
    graph.masks = sorted(inputs, key=lambda kind: kind.window or 0)
    graph.model.validate_nodes_and_infer_types()
    labels = ", ".join(f"{label} in {graph.layer_masks.count(label)}" for label in dict.fromkeys(graph.layer_masks))
    graph.note(STAGE, f"{labels} of {len(attentions)} layers")


def _mask_source(attention: ov.Node) -> ov.Output:
    if attention.get_input_size() <= MASK_PORT:
        raise UnsupportedModelError(STAGE, f"attention {attention.get_friendly_name()!r} has no mask input")
    return attention.input_value(MASK_PORT)


def _key(output: ov.Output) -> tuple[int, int]:
    return output.get_node().get_instance_id(), output.get_index()


def _classify(model: ov.Model, sources: list[ov.Output], capacity: int) -> dict[tuple[int, int], Seen]:
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
    compiled = get_core().compile_model(masks, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

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


def _kind_of(probes: list[Probe], masks: list[NDArray[np.float32]], where: str) -> Seen:
    window = _window_of(masks[2])
    slopes = _slopes_of(masks[2])
    for probe, mask in zip(probes, masks, strict=True):
        cells = visible_cells(probe.past, probe.new, window)
        planes = mask.reshape(-1, *cells.shape) if mask.size % cells.size == 0 else mask[None]
        bias = _linear(probe, np.array(slopes or (0.0,)))
        if not _is_as_expected(planes, cells, bias):
            raise UnsupportedModelError(
                STAGE,
                f"the mask {where!r} is neither causal nor a window, plain or with a bias linear in the distance "
                f"(evaluated with {probe.past} past and {probe.new} new tokens, shape {list(mask.shape)})",
            )
    return Seen(MaskKind(window), slopes)


def _is_as_expected(planes: NDArray[np.float32], cells: NDArray[np.bool_], bias: NDArray[np.float64]) -> bool:
    """Hidden where no cell is seen; else the bias, but for what all cells of a row have in common: a softmax drops it.

    ``planes [heads, new, past + new]``; one plane serves all heads. Without a bias the visible cells must hold exactly 0.
    """
    if planes.shape[1:] != cells.shape or len(planes) != len(bias) or not np.all(planes[:, ~cells] < HIDDEN_BELOW):
        return False
    if len(bias) == 1 and not bias.any():
        return bool(np.all(planes[:, cells] == VISIBLE))
    rest = np.where(cells, planes - bias, np.nan)
    spread = np.nanmax(rest, axis=2) - np.nanmin(rest, axis=2)
    return bool(np.all(spread <= BIAS_TOLERANCE * (1 + np.abs(bias).max())))


def _linear(probe: Probe, slopes: NDArray[np.float64]) -> NDArray[np.float64]:
    """``slope * (key - query)``, ``[heads, new, past + new]``."""
    query = np.arange(probe.past, probe.past + probe.new)[:, None]
    key = np.arange(probe.past + probe.new)[None, :]
    return slopes[:, None, None] * (key - query)


def _slopes_of(mask: NDArray[np.float32]) -> tuple[float, ...]:
    """What each head's bias grows by from one key to the next, at the last row of a long probe; () if it has no bias."""
    last = mask.reshape(-1, *mask.shape[-2:])[:, -1] if mask.ndim > 1 else mask[None]
    seen = last[0] >= HIDDEN_BELOW
    if not seen.any() or not last[:, seen].any():
        return ()
    places = np.flatnonzero(seen)
    first, final = int(places[0]), int(places[-1])
    rise = (last[:, final].astype(np.float64) - last[:, first]) / max(final - first, 1)
    return tuple(float(np.float32(value)) for value in rise)


def _window_of(mask: NDArray[np.float32]) -> int | None:
    """The window that the last row of a long probe shows, None if it sees everything."""
    last = np.atleast_2d(mask.reshape(-1, mask.shape[-1]))[-1]
    seen = int(np.count_nonzero(last >= HIDDEN_BELOW))
    return None if seen in (0, last.size) else seen


def visible_cells(past: int, new: int, window: int | None) -> NDArray[np.bool_]:
    """Plain definition of visibility, ``[new, past + new]``: token q sees k if k <= q and k > q - window."""
    query = np.arange(past, past + new)[:, None]
    key = np.arange(past + new)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _mask_input(graph: StepGraph, kind: MaskKind, rows: ov.Dimension) -> ov.Node:
    return graph.add_parameter(kind.port_name, ov.PartialShape([1, 1, rows, -1]), ov.Type.f32)


def _with_bias(graph: StepGraph, mask: ov.Output, slopes: tuple[float, ...], rows: ov.Dimension) -> ov.Output:
    """``mask [1, 1, S, T+S]`` and ``slope * (key - query)`` for each head: ``[1, heads, S, T+S]``.

    Distances are whole numbers, exact in every precision; positions of thousands would not be in bf16.
    """
    keys = graph.parameter(KEY_POSITIONS) or graph.add_parameter(
        KEY_POSITIONS, ov.PartialShape([1, 1, 1, -1]), ov.Type.i32
    )
    queries = graph.parameter(QUERY_POSITIONS) or graph.add_parameter(
        QUERY_POSITIONS, ov.PartialShape([1, 1, rows, 1]), ov.Type.i32
    )
    distance = ops.convert(ops.subtract(keys, queries), mask.get_element_type().get_type_name())
    factors = ops.convert_like(ops.constant(np.array(slopes, np.float32).reshape(1, -1, 1, 1)), distance)
    return ops.add(mask, ops.multiply(distance, factors)).output(0)


def _cast(mask: ov.Node, element_type: ov.Type) -> ov.Output:
    same = mask.get_element_type() == element_type
    return mask.output(0) if same else ops.convert(mask, element_type.get_type_name()).output(0)

"""Turns queries and keys of a GGUF file's model by the angles that the file says, for OpenVINO's reader leaves some of them out:
factors in a tensor of their own, those of long contexts, and that layers with sliding windows have angles of their own.
"""

from __future__ import annotations

import math
import re

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from staticllm.errors import ModelError, quoted
from staticllm.model_files.gguf_architectures import EXPORT, architecture_of, has_window, layer_of
from staticllm.model_files.gguf_header import GGUFHeader
from staticllm.model_files.gguf_tensors import ROTATION_TENSORS

from ..graph.step_graph import consumers

_ROTATED = re.compile(r"blk\.\d+\.[QK]cur_rope$")
_FREQUENCIES, _SHORT, _LONG = ROTATION_TENSORS
_MOST_NODES = 1000


def restore_angles(model: ov.Model, header: GGUFHeader) -> None:
    """Replace the angles and the factor of every cosine and sine.

    Raises:
        ModelError: the factors of the file do not fit, or the reader's graph is not the one that is known.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() in ("Cos", "Sin"):
            _restore(node, header)
    model.validate_nodes_and_infer_types()


def _restore(node: ov.Node, header: GGUFHeader) -> None:
    is_windowed = {has_window(header, layer) for layer in _layers_behind(node)}
    architecture = architecture_of(header)
    own_base = architecture.window_base
    if not is_windowed or (own_base is not None and len(is_windowed) > 1):
        raise ModelError(f"{quoted(header.path)} turns its layers in a way that is not known: {EXPORT}")
    half = node.get_output_partial_shape(0)[3].get_length()
    (factor,) = consumers(node.output(0))
    if factor.get_type_name() != "Multiply":
        raise ModelError(f"{quoted(header.path)} turns its layers in a way that is not known: {EXPORT}")
    if own_base is not None and is_windowed == {True}:
        base = header.metadata.get(f"{header.architecture}.rope.freq_base_swa", own_base)
        turn = _constant(float(base) ** (-np.arange(half) / half))
        size = 1.0
    else:
        turn = _turn(header, half, _positions(node))
        size = 1.0 if architecture.normed_after_rotation else magnitude(header)  # the norm divides by it again
    node.input(0).replace_source_output(ops.multiply(_positions(node), turn).output(0))
    factor.input(1).replace_source_output(ops.constant(np.float32(size)).output(0))


def _turn(header: GGUFHeader, half: int, positions: ov.Output) -> ov.Node:
    """Return the angles of one position, those of long contexts if a call has positions beyond the original context."""
    short = _constant(frequencies(header, half))
    context = header.whole("rope.scaling.original_context_length")
    if not context or not any(tensor.name == _LONG for tensor in header.tensors):
        return short
    largest = ops.reduce_max(positions, np.arange(4), keep_dims=True)
    is_long = ops.greater_equal(largest, ops.constant(context, positions.get_element_type()))
    return ops.select(is_long, _constant(frequencies(header, half, _LONG)), short)


def _constant(turn: NDArray[np.float64]) -> ov.Node:
    return ops.constant(turn.astype(np.float32).reshape(1, 1, 1, len(turn)))


def _layers_behind(node: ov.Node) -> set[int]:
    """Return the layers whose queries and keys read a value."""
    waiting = consumers(node.output(0))
    found = set[int]()
    seen = set[str]()
    while waiting and len(seen) < _MOST_NODES * 100:
        each = waiting.pop()
        name = each.get_friendly_name()
        if _ROTATED.search(name):
            layer = layer_of(name)
            found |= {layer} if layer is not None else set()
        elif name not in seen:
            seen.add(name)
            waiting += [reader for port in each.outputs() for reader in consumers(port)]
    return found


def _positions(node: ov.Node) -> ov.Output:
    """Return the positions that a cosine's angles are computed of, ``[1, rows, 1, 1]``."""
    waiting = [node.input_value(0)]
    while waiting:
        value = waiting.pop(0)
        if value.get_node().get_type_name() == "Transpose":
            return value
        waiting += value.get_node().input_values()
    raise ModelError(f"the angles of {node.get_friendly_name()!r} do not come from positions: {EXPORT}")


def _number(header: GGUFHeader, key: str, default: float) -> float:
    """Return a number behind the architecture's name.

    Raises:
        ModelError: it is none.
    """
    value = header.metadata.get(f"{header.architecture}.{key}", default)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ModelError(f"{quoted(header.path)} has no number as {header.architecture}.{key}: download it again")
    return float(value)


def _scaling(header: GGUFHeader) -> tuple[str, float]:
    """Return the kind of scaling, and by what it divides angles."""
    factor = _number(header, "rope.scaling.factor", 0) or _number(header, "rope.scale_linear", 0) or 1.0
    kind = header.text(f"{header.architecture}.rope.scaling.type", "linear")
    return kind, factor if kind in ("linear", "yarn") else 1.0


def frequencies(header: GGUFHeader, half: int, own: str = _SHORT) -> NDArray[np.float64]:
    """Return the angles of one position, ``[half]``, in radians (YaRN, arXiv 2309.00071; ``ggml_rope_ext``).

    Args:
        own: The tensor with the factors for the length of the context (LongRoPE, arXiv 2402.13753).
    """
    base = _number(header, "rope.freq_base", 10000.0)
    plain = base ** (-np.arange(half) / half)
    kind, factor = _scaling(header)
    for name in (_FREQUENCIES, own):
        plain = plain / factors(header, name, half)
    slow = plain / factor
    if kind != "yarn":
        return slow
    kept = (1 - _ramp(header, half, base)) * _number(header, "rope.scaling.yarn_ext_factor", 1.0)
    return slow * (1 - kept) + plain * kept


def factors(header: GGUFHeader, name: str, half: int) -> NDArray[np.float64]:
    """Return what a tensor divides angles by, ``[half]``; ones without it.

    Raises:
        ModelError: it does not fit, or has zeros.
    """
    tensor = next((each for each in header.tensors if each.name == name), None)
    if tensor is None:
        return np.ones(half)
    if tensor.kind != "F32" or tensor.shape != (half,):
        raise ModelError(
            f"{quoted(header.path)} has {name} of other sizes than the {half} angles of a head: download it again"
        )
    found = np.memmap(header.path, "<f4", "r", tensor.offset, (half,)).astype(np.float64)
    if not np.isfinite(found).all() or (found <= 0).any():
        raise ModelError(f"{quoted(header.path)} has numbers in {name} that divide by nothing: download it again")
    return found


def _ramp(header: GGUFHeader, half: int, base: float) -> NDArray[np.float64]:
    """Return for each angle how far it is scaled: 0 for the fastest, 1 for the slowest."""
    context = _number(header, "rope.scaling.original_context_length", 0) or _number(header, "context_length", 1)
    fast, slow = (
        _number(header, f"rope.scaling.yarn_beta_{which}", value) for which, value in (("fast", 32), ("slow", 1))
    )
    ends = [half * math.log(context / (turns * 2 * math.pi)) / math.log(base) for turns in (fast, slow)]
    low = max(0, math.floor(ends[0]))
    high = min(2 * half - 1, math.ceil(ends[1]))
    return np.clip((np.arange(half) - low) / max(0.001, high - low), 0, 1)


def magnitude(header: GGUFHeader) -> float:
    """Return by what cosines and sines are multiplied."""
    kind, factor = _scaling(header)
    size = _number(header, "rope.scaling.attn_factor", 1.0) * _number(header, "rope.scaling.yarn_attn_factor", 1.0)
    if kind != "yarn":
        return size
    multiplier = _number(header, "rope.scaling.yarn_log_multiplier", 0.0)
    longer = math.log(factor) if factor > 1 else 0.0
    whole = size * (1 + 0.1 * longer)
    return whole / (1 + 0.1 * multiplier * longer) if multiplier else whole

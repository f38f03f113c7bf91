"""Makes of the model that OpenVINO's reader gives what the architecture of a GGUF file computes."""

from __future__ import annotations

import re

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.errors import ModelError, quoted, shown
from staticllm.model_files.gguf_architectures import EXPORT, architecture_of, layer_of
from staticllm.model_files.gguf_header import GGUFHeader
from staticllm.model_files.gguf_tensors import ROTATION_TENSORS, head_size, num_heads, num_kv_heads

from ..graph.step_graph import redirect

WEIGHT = "weight.weight_"
"""Begins the names of the reader's weights."""
JOINED = re.compile(r"(blk\.\d+\.attn_)qkv(\.\w+)")
"""Queries, keys and values in one tensor, of which the reader makes three."""
_MASK, _WINDOW_MASK = "KQ_mask_sliced", "KQ_mask_swa_sliced"
"""The reader gives every other layer a window if a file does not say which have one."""
_LISTED = 3


def mend_layers(model: ov.Model, header: GGUFHeader) -> None:
    """Change a model of the reader in place.

    Raises:
        ModelError: there are tensors that it does not use.
    """
    values = {
        re.sub(r"^[A-Za-z]+_\d+_", "", node.get_friendly_name()): node
        for node in model.get_ordered_ops()
        if node.get_type_name() != "Result"
    }
    _check_tensors(values, header)
    _split_heads(values, header)
    architecture = architecture_of(header)
    for name, node in values.items():
        layer = layer_of(name)
        if layer is None or not name.endswith("cur_rope"):
            continue
        before = name.removesuffix("_rope")
        if architecture.period_unrotated and (layer + 1) % architecture.period_unrotated == 0:
            redirect(node.output(0), _value(values, header, f"{before}_r").output(0))
        elif architecture.normed_after_rotation:
            _norm_after(node, _value(values, header, f"{before}_normed"))
    if architecture.windows == "all" and {_MASK, _WINDOW_MASK} <= values.keys():  # one layer may have the second alone
        redirect(values[_MASK].output(0), values[_WINDOW_MASK].output(0))
    if architecture.divides_logits and "result_output_scaled" in values:
        factor = values["result_output_scaled"].input_value(1).get_node()
        inverse = ops.constant(np.float32(1 / factor.data.reshape(-1)[0]))
        values["result_output_scaled"].input(1).replace_source_output(inverse.output(0))
    model.validate_nodes_and_infer_types()


def _value(values: dict[str, ov.Node], header: GGUFHeader, name: str) -> ov.Node:
    if name not in values:
        raise ModelError(f"{quoted(header.path)} has layers without {name}, which its architecture has: {EXPORT}")
    return values[name]


def _split_heads(values: dict[str, ov.Node], header: GGUFHeader) -> None:
    """Give single heads their axis, which the reader leaves out: it takes their tokens for heads, or heads for tokens.

    Heads are ``[1, tokens, heads, size]``, the products before and after them ``[1, 1, tokens, numbers]``.
    """
    for letter, count in (("Q", num_heads(header)), ("K", num_kv_heads(header))):
        names = [name for name in values if re.fullmatch(rf"blk\.\d+\.{letter}cur", name)] if count == 1 else []
        for name in names:
            if f"{name}_r" not in values and f"{name}_normed" not in values:
                rows = values.get(f"{name}_b", values[name])
                readers = rows.output(0).get_target_inputs()
                heads = ops.reshape(rows, [1, -1, 1, head_size(header)], False)
                for reader in readers:
                    reader.replace_source_output(heads.output(0))
                values[f"{name}_r"] = heads
    for name in [name for name in values if name.endswith(".attn_out")] if num_heads(header) == 1 else []:
        rows = ops.reshape(values[name].input_value(0), [1, 1, -1, head_size(header)], False)
        values[name].input(0).replace_source_output(rows.output(0))


def _norm_after(rotated: ov.Node, normed: ov.Node) -> None:
    """Multiply by the weights of a norm after the rotation, which does not change what the norm divides by."""
    weights = normed.input_value(1)
    redirect(normed.output(0), normed.input_value(0))
    readers = rotated.output(0).get_target_inputs()
    scaled = ops.multiply(rotated, weights)
    for reader in readers:
        reader.replace_source_output(scaled.output(0))


def _check_tensors(values: dict[str, ov.Node], header: GGUFHeader) -> None:
    """Refuse a file with tensors that the model does not have."""
    used = {name.removeprefix(WEIGHT) for name in values if name.startswith(WEIGHT)}
    unused = [
        tensor.name
        for tensor in header.tensors
        if tensor.name not in used
        and tensor.name not in ROTATION_TENSORS
        and JOINED.sub(r"\1q\2", tensor.name) not in used
    ]
    if unused:
        more = ", …" if len(unused) > _LISTED else ""
        raise ModelError(
            f"{quoted(header.path)} has tensors that OpenVINO's reader leaves out "
            f"({', '.join(map(shown, unused[:_LISTED]))}{more}): {EXPORT}"
        )

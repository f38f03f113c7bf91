"""Names the linear layers of a GGUF file's model after the modules of the original, by which adapters find them.

Many files have the rows of queries and keys in another order. ``rotate_halves`` has put them back where they rotate; here that is
done in layers that do not.
"""

from __future__ import annotations

import re

import numpy as np
import openvino as ov

from staticllm.compiler_passes.rewrites.rotate_halves import has_pairs, order_of_halves, reorder_rows
from staticllm.sources.gguf_architectures import architecture_of, head_size
from staticllm.sources.gguf_header import GGUFHeader

_MODULES = {
    "Qcur": "self_attn.q_proj", "Kcur": "self_attn.k_proj", "Vcur": "self_attn.v_proj", "attn_out": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_out": "mlp.down_proj",
}  # fmt: skip
"""The reader's names of products, and those of modules in a layer."""
_JOINED = "mlp.gate_up_proj"
"""What computes both in layers without another product for the gate."""
_PRODUCT = re.compile(rf"MatMul_\d+_blk\.(\d+)\.({'|'.join(_MODULES)})$")
_HEAD = re.compile(r"MatMul_\d+_result_output$")
_REORDERED = ("Qcur", "Kcur")


def name_modules(model: ov.Model, header: GGUFHeader) -> None:
    """Name the products of a model, but no queries and keys whose rows are in another order than the original's."""
    has_other_order = has_pairs(model)
    period = architecture_of(header).period_unrotated
    order = order_of_halves(1, head_size(header))
    products = (_PRODUCT.match(node.get_friendly_name()) for node in model.get_ordered_ops())
    gated = {found[1] for found in products if found is not None and found[2] == "ffn_gate"}
    for node in model.get_ordered_ops():
        name = node.get_friendly_name()
        if node.get_type_name() != "MatMul":
            continue
        if _HEAD.match(name):
            node.set_friendly_name("__module.lm_head/aten::linear/MatMul")
        found = _PRODUCT.match(name)
        if found is None or (found[2] in _REORDERED and has_other_order):
            continue
        is_unrotated = period and (int(found[1]) + 1) % period == 0
        if found[2] in _REORDERED and is_unrotated and not _reorder(node, order):
            continue
        module = _MODULES[found[2]]
        if found[2] == "ffn_up" and found[1] not in gated:
            module = _JOINED
        node.set_friendly_name(f"__module.model.layers.{found[1]}.{module}/aten::linear/MatMul")


def _reorder(product: ov.Node, order: np.ndarray[tuple[int], np.dtype[np.intp]]) -> bool:
    """Reorder the rows of each head as ``rotate_halves`` does."""
    count = product.get_output_partial_shape(0)[-1].get_length() // len(order)
    return reorder_rows(product, np.concatenate([head * len(order) + order for head in range(count)]))

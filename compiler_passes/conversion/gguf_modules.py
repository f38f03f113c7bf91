"""Names the linear layers of a GGUF file's model after the modules of the original, by which adapters find them.

Many files have the rows of queries and keys in another order. ``rotate_halves`` has put them back where they rotate; here that is
done in layers that do not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import openvino as ov

from staticllm.model_files.gguf_architectures import architecture_of
from staticllm.model_files.gguf_header import GGUFHeader
from staticllm.model_files.gguf_tensors import head_size

from ..rewrites.rotate_halves import has_pairs, order_of_halves, reorder_rows

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
    layers: dict[int, dict[str, ov.Node]] = defaultdict(dict)
    for node in model.get_ordered_ops():
        name = node.get_friendly_name()
        if node.get_type_name() == "MatMul" and (found := _PRODUCT.match(name)):
            layers[int(found[1])][found[2]] = node
        elif node.get_type_name() == "MatMul" and _HEAD.match(name):
            node.set_friendly_name("__module.lm_head/aten::linear/MatMul")
    has_other_order = has_pairs(model)
    period = architecture_of(header).period_unrotated
    for layer, products in layers.items():
        is_unrotated = period and (layer + 1) % period == 0
        is_ordered = not has_other_order and (not is_unrotated or _reorder(products, head_size(header)))
        for name, node in products.items():
            module = _JOINED if name == "ffn_up" and "ffn_gate" not in products else _MODULES[name]
            if is_ordered or name not in _REORDERED:
                node.set_friendly_name(f"__module.model.layers.{layer}.{module}/aten::linear/MatMul")


def _reorder(products: Mapping[str, ov.Node], size: int) -> bool:
    """Reorder queries and keys of a layer as ``rotate_halves`` does; heads have ``size`` rows."""
    nodes = [products[name] for name in _REORDERED if name in products]
    counts = [node.get_output_partial_shape(0)[-1].get_length() // size for node in nodes]
    orders = {node: order_of_halves(count, size) for node, count in zip(nodes, counts, strict=True)}
    return len(orders) == len(_REORDERED) and reorder_rows(orders)

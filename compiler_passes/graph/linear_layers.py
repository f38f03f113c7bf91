"""Finds the linear layers of a model: MatMul with constant weights, compressed or not, and the module that each was made of.

Exporters name a node after the module that it was made of (``__module.model.layers.0.mlp.up_proj/aten::linear/MatMul``), and a
constant after the parameter (``self.model.layers.0.mlp.up_proj.weight``). The path of a module is found in these names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import openvino as ov

from .step_graph import through

_TEXT_PART = "language_model."
_ON_WEIGHTS = ("Convert", "Multiply", "Subtract", "Reshape", "Transpose")


@dataclass(frozen=True)
class LinearLayer:
    """A matrix product with constant weights."""

    node: ov.Node
    in_size: int
    out_size: int
    names: tuple[str, ...]
    """The names of the product and of its constant."""

    @property
    def producer(self) -> ov.Output:
        """The values that it reads, ``[..., in_size]``."""
        return self.node.input_value(0)


def find_linear_layers(model: ov.Model) -> list[LinearLayer]:
    """Return the linear layers of a model in their order."""
    found = (_linear_layer(node) for node in model.get_ordered_ops() if node.get_type_name() == "MatMul")
    return [layer for layer in found if layer is not None]


def layers_of_modules(layers: Iterable[LinearLayer], paths: Iterable[str]) -> dict[str, list[LinearLayer]]:
    """Return path of a module → the layers that were made of it: none, one, or several if the model uses it repeatedly.

    A path within the text part of a larger model finds that of the text part alone.
    """
    named = [(layer, " ".join(layer.names)) for layer in layers]
    found: dict[str, list[LinearLayer]] = defaultdict(list)
    for path in paths:
        for name in dict.fromkeys((path, path.replace(_TEXT_PART, ""))):
            pattern = re.compile(rf"(?<![\w]){re.escape(name)}(?![\w])")
            found[path] = [layer for layer, names in named if name in names and pattern.search(names)]
            if found[path]:
                break
    return found


def _linear_layer(node: ov.Node) -> LinearLayer | None:
    weights = node.input_value(1)
    attributes = node.get_attributes()
    constant = through(weights, *_ON_WEIGHTS).get_node()
    shape = weights.get_partial_shape()
    is_plain = constant.get_type_name() == "Constant" and not attributes["transpose_a"]
    if not is_plain or len(shape) != 2 or shape.is_dynamic:
        return None
    sizes = shape.to_shape()
    out_size, in_size = sizes if attributes["transpose_b"] else reversed(list(sizes))
    names = node.get_friendly_name(), constant.get_friendly_name()
    return LinearLayer(node, int(in_size), int(out_size), names)

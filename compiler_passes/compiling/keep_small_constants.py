"""Keeps small constants in a blob that is exported without its weights.

OpenVINO records at each constant its place in the weights file, in a weightless attribute, and reads it from there when such a
blob is imported. A constant that a transformation has changed keeps the attribute (2026.4), and gets a wrong value: a slice then
begins elsewhere, and a reshape fails.
"""

from __future__ import annotations

import math

import openvino as ov

INLINE_BYTES = 1 << 16
_NOTE = "WeightlessCacheAttribute"


def keep_small_constants(model: ov.Model) -> None:
    """Remove the weightless attribute from every constant of less than ``INLINE_BYTES`` bytes."""
    for node in model.get_ops():
        if node.get_type_name() != "Constant":
            continue
        num_bytes = math.prod(node.get_output_shape(0)) * node.get_element_type().bitwidth // 8
        info = node.get_rt_info()
        for name in [name for name in info.keys() if name.startswith(_NOTE)]:  # noqa: SIM118 - no mapping
            if num_bytes < INLINE_BYTES:
                del info[name]

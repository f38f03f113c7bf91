"""Before a program is exported without its weights: small constants stay in the blob.

OpenVINO notes at each constant where it lies in the weights file, and reads it from there when such a blob is imported. One
that a transformation has changed keeps the note (2026.4): a slice then begins elsewhere, and a reshape fails.
"""

from __future__ import annotations

import math

import openvino as ov

INLINE_BYTES = 1 << 16
_NOTE = "WeightlessCacheAttribute"


def keep_small_constants(model: ov.Model) -> None:
    """Take the note off every constant under ``INLINE_BYTES``."""
    for node in model.get_ops():
        if node.get_type_name() != "Constant":
            continue
        num_bytes = math.prod(node.get_output_shape(0)) * node.get_element_type().bitwidth // 8
        info = node.get_rt_info()
        for name in [name for name in info.keys() if name.startswith(_NOTE)]:  # noqa: SIM118 - no mapping
            if num_bytes < INLINE_BYTES:
                del info[name]

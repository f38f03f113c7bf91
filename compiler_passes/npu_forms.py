"""Lists the rewrites that decoders and encoders have in common on NPUs, in their order."""

from __future__ import annotations

from collections.abc import Callable

from .graph.step_graph import StepGraph
from .rewrites.gate_last import gate_last
from .rewrites.halve_weights import halve_weights
from .rewrites.lead_groups import lead_groups
from .rewrites.merge_grouped import merge_grouped
from .rewrites.narrow_masks import narrow_masks
from .rewrites.narrow_scales import narrow_scales
from .rewrites.shift_zero_points import shift_zero_points

NPU_FORMS: tuple[tuple[str, Callable[[StepGraph], None]], ...] = (
    ("narrow_masks", narrow_masks),
    ("gate_last", gate_last),
    ("halve_weights", halve_weights),
    ("merge_grouped", merge_grouped),
    ("shift_zero_points", shift_zero_points),
    ("narrow_scales", narrow_scales),
    ("lead_groups", lead_groups),
)
"""The names of passes, and what they run. Each choice is a row of a table in ``docs/npu.md``."""

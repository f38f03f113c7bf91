"""What the programs of a model in blocks cost on an NPU, by the schedule of Intel's compiler; no NPU has run them.

The tables hold microseconds that the cost model of the NPU compiler (openvino 2026.4.1, platform 4000, 4 tiles) predicts for one
decoder block of a 0.5B shape (hidden 896, 14 query and 2 KV heads of 64, inner 4864) with weights as inputs, and for its
LM head over 151,936 tokens. The schedule knows neither the host nor the driver: ``call_seconds`` per compiled part that runs is
an assumption. Nothing is scaled to other models or platforms.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from staticllm.core import Variant

from .cost_model import Blocks

NUM_LAYERS = 24
CALL_SECONDS = 20e-6
"""Assumed seconds of host and driver per part that runs; no schedule knows it."""
ROW_STEP = 16
"""The compiler pads rows to a multiple of this, and calls with more than that in other numbers cost up to twice as much."""

Line = Mapping[int, float]
"""Microseconds by KV length."""

INT8: Mapping[int, Line] = {
    1: {256: 420.1, 1152: 439.3, 2304: 472.0, 4096: 529.6, 8192: 676.4},
    2: {256: 416.8, 1152: 445.1, 2304: 478.5, 4096: 514.2, 8192: 668.9},
    4: {256: 436.5, 1152: 467.9, 2304: 495.3, 4096: 590.3, 8192: 739.7},
    8: {256: 457.3, 1152: 501.2, 2304: 578.7, 4096: 704.7, 8192: 1023.7},
    16: {0: 446.7, 256: 483.1, 1152: 563.6, 2304: 659.0, 4096: 840.0, 8192: 1626.2},
    64: {0: 593.6, 256: 659.5, 1152: 999.6, 2304: 1155.9, 4096: 1618.0, 8192: 3687.8},
    128: {0: 927.2, 256: 1184.9, 1152: 1366.9, 2304: 1859.2, 4096: 2867.0, 8192: 6586.4},
    256: {0: 2064.8, 256: 2076.6, 1152: 2754.8, 2304: 3522.2, 4096: 5709.8, 8192: 13231.5},
    512: {0: 3701.0, 256: 4125.8, 1152: 5505.2, 2304: 9153.6, 4096: 12425.6},
    1024: {0: 8350.6, 256: 10781.1, 1152: 11907.3, 2304: 17879.6},
}
"""Symmetric 8-bit weights: rows → KV length → microseconds of one block."""
INT4: Mapping[int, Line] = {
    1: {1152: 305.0, 4096: 386.0},
    4: {1152: 314.0, 4096: 442.0},
    16: {0: 295.0, 1152: 402.0, 4096: 665.0},
    64: {0: 407.0, 1152: 783.0, 4096: 1378.0},
    256: {0: 1318.0, 1152: 2167.0, 4096: 5123.0},
    1024: {0: 7802.0, 1152: 11336.0},
}
"""4-bit weights by channel; their transfers are repriced, because the cost model counts them as 16-bit on this platform."""
INT8_HEAD: Line = {1: 2387.2, 4: 2529.7, 16: 2902.5}
INT4_HEAD: Line = {1: 1203.0}
"""LM head: number of logits → microseconds."""
ALIGNED_SINGLE_ROW: Line = {255: 406.6, 1151: 409.1, 2303: 455.0}
"""8-bit weights: one row at KV lengths that make rows and KV slots together a multiple of 16."""


@dataclass(frozen=True)
class NpuCosts:
    """The seconds of a call of 24 layers in blocks and the LM head.

    Between two entries of a table, in rows and in KV length, costs are linear; beyond the last ones they go on so. Rows are
    rounded up to a multiple of 16, as programs for NPUs must be.
    """

    blocks: Mapping[int, Line]
    head: Line
    aligned: Line
    num_blocks: int = NUM_LAYERS
    call_seconds: float = CALL_SECONDS
    """Further seconds of each part."""

    @property
    def divided(self) -> Blocks:
        """How the calls are divided."""
        return Blocks(self.num_blocks, self.tail_seconds)

    def __call__(self, variant: Variant) -> float:
        blocks = NUM_LAYERS * self._layer_seconds(variant) + self.num_blocks * self.call_seconds
        return blocks + self.tail_seconds(variant)

    def _layer_seconds(self, variant: Variant) -> float:
        if variant.rows == 1 and self.aligned and (variant.rows + variant.kv_len) % ROW_STEP == 0:
            return _at(self.aligned, variant.kv_len) * 1e-6
        rows = variant.rows if variant.rows in self.blocks else -(-variant.rows // ROW_STEP) * ROW_STEP
        return _at({size: _at(costs, variant.kv_len) for size, costs in self.blocks.items()}, rows) * 1e-6

    def tail_seconds(self, variant: Variant) -> float:
        """Return the seconds of what runs after the last block: the LM head."""
        return _at(self.head, variant.num_logits) * 1e-6 + self.call_seconds


NPU_COSTS: Mapping[str, NpuCosts] = {
    "npu-4000": NpuCosts(INT8, INT8_HEAD, ALIGNED_SINGLE_ROW),
    "npu-4000-int4": NpuCosts(INT4, INT4_HEAD, {}),
}
"""The shipped costs, by the name that ``staticllm simulate --costs`` takes."""


def _at(line: Line, place: int) -> float:
    """Return the value at a place on the line through its two nearest entries, but never less than the least entry."""
    places: Sequence[int] = sorted(line)
    if len(places) == 1:
        return line[places[0]]
    index = min(max(bisect_right(places, place), 1), len(places) - 1)
    first = places[index - 1]
    second = places[index]
    value = line[first] + (line[second] - line[first]) * (place - first) / (second - first)
    return max(value, min(line.values()))

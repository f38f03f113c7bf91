"""Programs with which `npu_check.py` compares the NPU compiler's predictions: a decoder block, and whole tiny models.

`programs_to_check` is the place to add others, such as the blocks that the library itself makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.compiler_passes.decoder import DECODER_UNMERGED
from staticllm.compiler_passes.lower import lower
from staticllm.compiler_passes.pass_pipeline import LoweringOptions
from staticllm.core import Variant
from staticllm.devices import get_core

WIDTH, HEADS, KV_HEADS, HEAD, INNER = 896, 14, 2, 64, 4864
"""The shape of the 0.5B block."""
MODELS = ("gpt2", "qwen2")
KV_LEN = 128


def programs_to_check(zoo: Path) -> Iterator[tuple[str, ov.Model]]:
    """Yield name and model of each program; all of them compile for every platform."""
    for kind in ("i8", "i4"):
        yield f"0.5B block, {kind}, 1 row, 1151 KV slots", Block(1, 1151, kind).model()
    yield "0.5B block, i8, 64 rows, 1152 KV slots", Block(64, 1152, "i8").model()
    for name in MODELS:
        model = get_core().read_model(zoo / name / "openvino_model.xml")
        passes = DECODER_UNMERGED.without("group_queries")
        lowered = lower(model, LoweringOptions(max_len=2 * KV_LEN, kv_type="f16"), passes)
        yield f"{name}, 1 row, {KV_LEN} KV slots", lowered.specialise(Variant(1, KV_LEN))


class Block:
    """One decoder block with static shapes, whose weights, in `kind` with a scale per row, are inputs.

    Key heads are cut by a Split, because platform 3720 refuses their Transpose, and KV heads are repeated. The sign of the
    rotation is in the sines.
    """

    def __init__(self, rows: int, kv_len: int, kind: str) -> None:
        self.rows = rows
        self.kv_len = kv_len
        self.kind = kind
        self.inputs: list[ov.Node] = []

    def model(self) -> ov.Model:
        rows, kv_len = self.rows, self.kv_len
        hidden = ops.convert(self._input([1, rows, WIDTH], "hidden"), "f32")
        q, k, v = self._projected(_normalised(hidden))
        keys, values = (ops.convert(each, "f16") for each in (k, v))
        past = [self._input([1, KV_HEADS, kv_len, HEAD], f"past.{name}") for name in ("key", "value")]
        mask = ops.convert(self._input([1, 1, rows, kv_len + rows], "mask"), "f32")
        all_keys, all_values = (
            _repeated(ops.concat([old, new], 2)) for old, new in zip(past, (keys, values), strict=True)
        )
        scores = ops.add(ops.matmul(q, all_keys, False, True), mask)
        mixed = ops.matmul(ops.softmax(scores, -1), all_values, False, False)
        rows_of_heads = ops.reshape(ops.transpose(mixed, np.array([0, 2, 1, 3])), [1, rows, HEADS * HEAD], False)
        hidden = ops.add(hidden, self._linear(rows_of_heads, "out", WIDTH, HEADS * HEAD))
        gate_up = self._linear(_normalised(hidden), "gate_up", 2 * INNER, WIDTH)
        gate, up = ops.split(gate_up, 2, 2).outputs()
        inner = ops.multiply(ops.swish(gate, _scalar(1.0)), up)
        hidden = ops.add(hidden, self._linear(inner, "down", WIDTH, INNER))
        results = [ops.result(each) for each in (ops.convert(hidden, "f16"), keys, values)]
        return ov.Model(results, self.inputs, "block")

    def _projected(self, hidden: ov.Node) -> Sequence[ov.Node]:
        """Return queries, keys and values `[1, heads, rows, 64]`; queries and keys are rotated."""
        sizes = [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD]
        merged = self._linear(hidden, "qkv", sum(sizes), WIDTH)
        cos, sin = (ops.convert(self._input([1, 1, self.rows, HEAD], name), "f32") for name in ("cos", "sin"))
        parts = ops.variadic_split(merged, 2, np.array(sizes)).outputs()
        q, k, v = (self._heads(part, count) for part, count in zip(parts, (HEADS, KV_HEADS, KV_HEADS), strict=True))

        def rotated(value: ov.Node) -> ov.Node:
            first, second = ops.split(value, 3, 2).outputs()
            return ops.add(ops.multiply(value, cos), ops.multiply(ops.concat([second, first], 3), sin))

        return ops.multiply(rotated(q), _scalar(HEAD**-0.5)), rotated(k), v

    def _heads(self, value: ov.Output, count: int) -> ov.Node:
        rows = ops.reshape(value, [1, self.rows, count, HEAD], False)
        if count == KV_HEADS and self.rows > 1:
            heads = ops.split(rows, 2, count).outputs()
            return ops.concat([ops.reshape(each, [1, 1, self.rows, HEAD], False) for each in heads], 1)
        return ops.transpose(rows, np.array([0, 2, 1, 3]))

    def _linear(self, value: ov.Node, name: str, outputs: int, inputs: int) -> ov.Node:
        weights = self._input([outputs, inputs], f"{name}.weight", self.kind)
        scale = self._input([outputs, 1], f"{name}.scale")
        matrix = ops.convert(ops.multiply(ops.convert(weights, "f16"), scale), "f32")
        return ops.matmul(value, matrix, False, True)

    def _input(self, shape: list[int], name: str, kind: str = "f16") -> ov.Node:
        node = ops.parameter(shape, getattr(ov.Type, kind), name=name)
        self.inputs.append(node)
        return node


def _scalar(value: float) -> ov.Node:
    return ops.constant(np.float32(value))


def _normalised(hidden: ov.Node) -> ov.Node:
    """Return RMSNorm without a weight, which is merged into the next matrix."""
    mean = ops.reduce_mean(ops.power(hidden, _scalar(2.0)), np.array([-1]), True)
    return ops.multiply(hidden, ops.divide(_scalar(1.0), ops.sqrt(ops.add(mean, _scalar(1e-6)))))


def _repeated(cache: ov.Node) -> ov.Node:
    """Return keys or values `[1, kv_heads, slots, 64]` once for each head, in f32."""
    slots = cache.get_output_shape(0)[2]
    target = np.array([1, KV_HEADS, HEADS // KV_HEADS, slots, HEAD])
    wide = ops.broadcast(ops.unsqueeze(ops.convert(cache, "f32"), ops.constant(2)), ops.constant(target))
    return ops.reshape(wide, [1, HEADS, slots, HEAD], False)

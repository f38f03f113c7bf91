"""Gives quantised weights the scales and zero points of their file, which OpenVINO's reader rounds.

A block of 4 or 5 bits has a scale and a minimum: ``weight = scale * number - minimum``. The reader makes ``scale * (number -
zero)`` of it with scale and zero point in f16, or with a whole zero point, and logits then differ by a hundredth of their range,
and more. In f32 they are those of the file. Blocks whose scale is a product of two numbers lose bits in f16 as well.

Numbers of types that no NPU takes become integers that are exactly the same: of 2 bits in 4, and those of MXFP4, which are halves
of whole numbers up to 12, in 8 bits with half the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from staticllm.model_files.gguf_header import GGUFHeader, GGUFTensor
from staticllm.model_files.gguf_tensors import head_size, num_heads, num_kv_heads

from .gguf_layers import JOINED, WEIGHT

Numbers = NDArray[np.float32]


def _halves(blocks: NDArray[np.uint8], at: int, count: int = 1) -> Numbers:
    """Return f16 numbers of each block, ``[blocks, count]``."""
    return np.ascontiguousarray(blocks[:, at : at + 2 * count]).view(np.float16).astype(np.float32)


def _of_two_halves(blocks: NDArray[np.uint8]) -> tuple[Numbers, Numbers]:
    return _halves(blocks, 0), -_halves(blocks, 2)


def _of_six_bits(blocks: NDArray[np.uint8]) -> tuple[Numbers, Numbers]:
    """Eight scales and eight minima of six bits each, times one f16 number each."""
    low, middle, high = np.split(blocks[:, 4:16], 3, 1)
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], 1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], 1)
    return _halves(blocks, 0) * scales, _halves(blocks, 2) * minima


def _of_bytes(blocks: NDArray[np.uint8]) -> tuple[Numbers, None]:
    """Sixteen signed scales, times one f16 number; the reader subtracts what the numbers are shifted by."""
    return np.ascontiguousarray(blocks[:, 192:208]).view(np.int8) * _halves(blocks, 208), None


def _of_four_bits(blocks: NDArray[np.uint8]) -> tuple[Numbers, Numbers]:
    """Sixteen scales and sixteen minima of four bits each, times one f16 number each."""
    return _halves(blocks, 80) * (blocks[:, :16] & 15), _halves(blocks, 82) * (blocks[:, :16] >> 4)


def _of_signed_six_bits(blocks: NDArray[np.uint8]) -> tuple[Numbers, None]:
    """Sixteen scales of six bits, of which 32 is subtracted, times one f16 number."""
    low, high = np.split(blocks[:, 96:108], [8], 1)
    upper = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 1)
    scales = np.concatenate([low & 15, low >> 4], 1) | (upper << 4)
    return _halves(blocks, 108) * (scales.astype(np.float32) - 32), None


def _of_half_exponents(blocks: NDArray[np.uint8]) -> tuple[Numbers, None]:
    """A power of two for 32 numbers, here half of it."""
    return np.ldexp(np.float32(0.5), blocks[:, :1].astype(np.int32) - 127), None


_LITTLE = np.float32(2.0**-22)
"""So small that 31 times it changes nothing, and so large that the zero point, one divided by it, minus a number is exact."""
_READERS: dict[str, tuple[int, Callable[[NDArray[np.uint8]], tuple[Numbers, Numbers | None]]]] = {
    "Q4_1": (20, _of_two_halves), "Q5_1": (24, _of_two_halves), "Q4_K": (144, _of_six_bits), "Q5_K": (176, _of_six_bits),
    "Q6_K": (210, _of_bytes), "Q2_K": (84, _of_four_bits), "Q3_K": (110, _of_signed_six_bits),
    "MXFP4": (17, _of_half_exponents),
}  # fmt: skip
"""Types whose scales the reader rounds or stores in a type of their own: bytes of a block, and what returns scales and minima."""
_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""The numbers of MXFP4 (``f4e2m1``), in halves."""


def _whole_halves(blocks: NDArray[np.uint8], shape: list[int]) -> ov.Node:
    """Return MXFP4's numbers as integers of 8 bits; a block has the first 16 in low halves of bytes, the others in high ones."""
    low, high = (_HALVES[each] for each in (blocks[:, 1:] & 15, blocks[:, 1:] >> 4))
    return ops.constant(np.concatenate([low, high], 1).reshape(shape))


def _of_four(node: ov.Node) -> ov.Node:
    """Return a constant of 2-bit numbers in 4 bits. Both have the first number in the lowest bits of a byte."""
    shape = node.get_output_shape(0)
    packed = np.asarray(node.data).reshape(-1).view(np.uint8)
    low, high = (((packed >> shift) & 3) | (((packed >> shift + 2) & 3) << 4) for shift in (0, 4))
    tensor = ov.Tensor(ov.Type.u4, shape)
    tensor.data.reshape(-1).view(np.uint8)[:] = np.stack([low, high], 1).reshape(-1)
    return ops.constant(tensor, shared_memory=True)


def restore_scales(model: ov.Model, header: GGUFHeader) -> int:
    """Replace the constants of a model that the reader made, and return the number of weights that changed."""
    tensors = {
        name: part for tensor in header.tensors if tensor.kind in _READERS for name, part in _parts(tensor, header)
    }
    data = np.memmap(header.path, np.uint8, "r")
    done = 0
    for node in model.get_ordered_ops():
        tensor = tensors.get(node.get_friendly_name().removeprefix(WEIGHT))
        if tensor is not None and node.get_friendly_name().startswith(WEIGHT):
            done += _restore(node, tensor, data)
    model.validate_nodes_and_infer_types()
    return done


def _parts(tensor: GGUFTensor, header: GGUFHeader) -> Iterator[tuple[str, GGUFTensor]]:
    """Yield what the reader makes of a tensor, by its names: one weight, or those of queries, keys and values."""
    joined = JOINED.fullmatch(tensor.name)
    if joined is None or len(tensor.shape) != 2:
        yield tensor.name, tensor
        return
    counts = [num_heads(header), num_kv_heads(header), num_kv_heads(header)]
    begin = tensor.offset
    row = tensor.num_bytes // tensor.shape[1]
    for letter, count in zip("qkv", counts, strict=True):
        rows = count * head_size(header)
        yield (
            f"{joined[1]}{letter}{joined[2]}",
            replace(tensor, shape=(tensor.shape[0], rows), offset=begin, num_bytes=rows * row),
        )
        begin += rows * row


def _restore(node: ov.Node, tensor: GGUFTensor, data: NDArray[np.uint8]) -> bool:
    """Replace scale and zero point of one tensor's weights, if they are in the form that is known."""
    while node.get_type_name() in ("Convert", "Reshape"):
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Multiply":
        return False
    num_bytes, read = _READERS[tensor.kind]
    blocks = data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(-1, num_bytes)
    scale, minimum = read(blocks)
    shape = list(node.input_value(1).get_shape())
    if int(np.prod(shape)) != scale.size:
        return False
    shifted = node.input_value(0).get_node()
    if minimum is not None:
        if shifted.get_type_name() != "Subtract":
            return False
        scale = np.where(
            scale == 0, minimum * _LITTLE, scale
        )  # such weights are all the minimum, whatever their numbers are
        zero = np.divide(minimum, scale, out=np.zeros_like(scale), where=scale != 0)
        _replace(shifted.input(1), zero.reshape(shape))
        _widen(shifted.input(0))
    elif tensor.kind == "MXFP4":
        numbers = _whole_halves(blocks, list(node.get_output_shape(0)))
        node.input(0).replace_source_output(ops.convert(numbers, "f32").output(0))
    else:
        _widen(node.input(0))
    _replace(node.input(1), scale.reshape(shape))
    return True


def _widen(port: Any) -> None:
    """Let a port read whole numbers in f32 that it read in f16, and those of 2 bits from 4."""
    node = port.get_source_output().get_node()
    if node.get_type_name() == "Convert" and node.get_output_element_type(0) == ov.Type.f16:
        numbers = node.input_value(0)
        is_narrow = numbers.get_element_type() == ov.Type.u2
        port.replace_source_output(ops.convert(_of_four(numbers.get_node()) if is_narrow else numbers, "f32").output(0))


def _replace(port: Any, values: Numbers) -> None:
    """Let a port read numbers in f32; both factors then are f32."""
    port.replace_source_output(ops.constant(np.ascontiguousarray(values, np.float32)).output(0))

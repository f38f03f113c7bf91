"""The tensors that each layer of a GGUF file must have, with their shapes, and those that it may have.

OpenVINO's reader looks at the tensors of the first layer and guesses: it takes keys for values where these are missing, and
broadcasts what a damaged shape leaves. So names and shapes are compared with what the metadata say, before anything is converted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from staticllm.errors import shown
from staticllm.model_files.gguf_header import GGUFHeader

ROTATION_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that this library reads itself."""
TOKENS = "tokenizer.ggml.tokens"
_Shapes = Mapping[str, tuple[str, ...]]
"""The sizes of tensors by name: names of ``_sizes``, which begin with the axis that changes fastest."""
_AROUND: _Shapes = {"token_embd.weight": ("embedding", "tokens"), "output_norm.weight": ("embedding",)}
_HEAD: _Shapes = {"output.weight": ("embedding", "tokens")}
"""Without it, the embeddings are the head."""
_LAYER: _Shapes = {
    "attn_norm.weight": ("embedding",), "attn_output.weight": ("queries", "embedding"),
    "ffn_norm.weight": ("embedding",), "ffn_down.weight": ("inner", "embedding"),
}  # fmt: skip
_APART: _Shapes = {
    "attn_q.weight": ("embedding", "queries"), "attn_k.weight": ("embedding", "keys"), "attn_v.weight": ("embedding", "keys"),
}  # fmt: skip
_JOINED: _Shapes = {"attn_qkv.weight": ("embedding", "queries and keys and values")}
_APART_BIASES: _Shapes = {"attn_q.bias": ("queries",), "attn_k.bias": ("keys",), "attn_v.bias": ("keys",)}
_JOINED_BIASES: _Shapes = {"attn_qkv.bias": ("queries and keys and values",)}
_OUTPUT_BIAS: _Shapes = {"attn_output.bias": ("embedding",)}
_GATED: _Shapes = {"ffn_gate.weight": ("embedding", "inner"), "ffn_up.weight": ("embedding", "inner")}
_INNER_BIASES: _Shapes = {"ffn_gate.bias": ("inner",), "ffn_up.bias": ("inner",), "ffn_down.bias": ("embedding",)}
_FUSED: _Shapes = {"ffn_up.weight": ("embedding", "gate and inner")}
_HEAD_NORMS: _Shapes = {"attn_q_norm.weight": ("head",), "attn_k_norm.weight": ("head",)}
_POST_NORMS: _Shapes = {"post_attention_norm.weight": ("embedding",), "post_ffw_norm.weight": ("embedding",)}
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d*)\.(.+)")
_LISTED = 3


@dataclass(frozen=True)
class LayerTensors:
    """What the layers of an architecture have beside what all have."""

    is_fused: bool = False
    """Whether gate and inner rows are one matrix."""
    has_biases: bool = False
    """Whether queries, keys and values have biases; otherwise they may have."""
    has_head_norms: bool = False
    has_post_norms: bool = False
    may_bias_inner: bool = True
    """Whether the feed-forward layers may have biases."""

    def shapes(self, found: set[str]) -> _Shapes:
        """Return the tensors of a layer, where ``found`` are the names that any layer has.

        Optional tensors are needed in all layers, and all of their group, if one is found in one.
        """
        is_joined = any(name in found for name in _JOINED)
        biases = _JOINED_BIASES if is_joined else _APART_BIASES
        groups = [_LAYER, _JOINED if is_joined else _APART, _FUSED if self.is_fused else _GATED]
        groups += [_HEAD_NORMS] if self.has_head_norms else []
        groups += [_POST_NORMS] if self.has_post_norms else []
        groups += [biases] if self.has_biases or found & set(biases) else []
        groups += [_OUTPUT_BIAS] if found & set(_OUTPUT_BIAS) else []
        groups += [_INNER_BIASES] if self.may_bias_inner and found & set(_INNER_BIASES) else []
        return {name: shape for group in groups for name, shape in group.items()}


def num_heads(header: GGUFHeader) -> int:
    """Return the number of heads of queries."""
    return header.whole("attention.head_count") or 1


def num_kv_heads(header: GGUFHeader) -> int:
    """Return the number of heads of keys and values."""
    return header.whole("attention.head_count_kv") or num_heads(header)


def head_size(header: GGUFHeader, key: str = "attention.key_length") -> int:
    """Return the size of a head of queries and keys; with ``attention.value_length`` that of values."""
    return header.whole(key) or max((header.whole("embedding_length") or 0) // num_heads(header), 1)


def rotated_size(header: GGUFHeader) -> int:
    """Return how many numbers of a head are turned."""
    return header.whole("rope.dimension_count") or head_size(header)


def wrong_tensors(header: GGUFHeader, layers: LayerTensors, remedy: str) -> Iterator[str]:
    """Yield which tensors are missing, have other shapes than the metadata say, or are not known, and what helps.

    The metadata must have been checked. ``remedy`` is what helps against tensors that are not known.
    """
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    found = {match[2] for name in shapes if (match := _LAYER_NAME.fullmatch(name))}
    sizes = _sizes(header)
    count = header.whole("block_count") or 0
    needed = dict(_AROUND) | {name: shape for name, shape in _HEAD.items() if name in shapes}
    yield from _compared(shapes, needed, sizes, "")
    in_layers = layers.shapes(found)
    for layer in range(count):  # at most one more than the file has layers: the caller takes the first reason
        yield from _compared(shapes, in_layers, sizes, f"blk.{layer}.")
    known = {*needed, *ROTATION_TENSORS, *(f"blk.{layer}.{name}" for layer in range(count) for name in in_layers)}
    unknown = [name for name in shapes if name not in known]
    if unknown:
        more = ", …" if len(unknown) > _LISTED else ""
        is_beyond = any((match := _LAYER_NAME.fullmatch(name)) and int(match[1]) >= count for name in unknown)
        more += f"; {header.architecture}.block_count is {count}" if is_beyond else ""
        yield f"has tensors that OpenVINO's reader leaves out ({', '.join(map(shown, unknown[:_LISTED]))}{more}): {remedy}"
    yield from _wrong_rotation(header)


def _sizes(header: GGUFHeader) -> Mapping[str, int]:
    """Return the sizes that the metadata say; 0 for that of a vocabulary that is not there."""
    tokens = header.metadata.get(TOKENS)
    head = head_size(header)
    queries = head * num_heads(header)
    keys = head * num_kv_heads(header)
    inner = header.whole("feed_forward_length") or 0
    return {
        "embedding": header.whole("embedding_length") or 0, "tokens": len(tokens) if isinstance(tokens, list) else 0,
        "queries": queries, "keys": keys, "queries and keys and values": queries + 2 * keys, "head": head,
        "inner": inner, "gate and inner": 2 * inner,
    }  # fmt: skip


_SAID_BY = {
    "embedding": "embedding_length", "queries": "attention.head_count", "keys": "attention.head_count_kv",
    "queries and keys and values": "attention.head_count", "head": "attention.key_length", "inner": "feed_forward_length",
    "gate and inner": "feed_forward_length",
}  # fmt: skip
"""The key behind the architecture's name that says a size."""


def _compared(
    shapes: Mapping[str, tuple[int, ...]], needed: _Shapes, sizes: Mapping[str, int], prefix: str
) -> Iterator[str]:
    """Yield what is wrong with the tensors of a layer, or of those around the layers."""
    for name, axes in needed.items():
        shape = shapes.get(prefix + name)
        right = tuple(sizes[axis] for axis in axes)
        if shape is None:
            yield f"has no {prefix}{name}, which must have the shape {list(right)}: download it again"
        elif shape != right:
            reasons = (f"{_SAID_BY.get(axis, TOKENS)}: {size}" for axis, size in zip(axes, right, strict=True))
            yield (
                f"has {prefix}{name} with the shape {list(shape)}, and its metadata say {list(right)} "
                f"({', '.join(reasons)}): download it again"
            )


def _wrong_rotation(header: GGUFHeader) -> Iterator[str]:
    """Yield which factors of angles do not fit. Those of short and of long contexts are two halves of one thing."""
    found = {tensor.name: tensor for tensor in header.tensors if tensor.name in ROTATION_TENSORS}
    half = rotated_size(header) // 2
    for name, tensor in found.items():
        if tensor.kind != "F32" or tensor.shape != (half,):
            yield (
                f"has {name} with the shape {list(tensor.shape)} in {tensor.kind}, and a head has {half} angles, whose "
                "factors are F32: download it again"
            )
    _, short, long = ROTATION_TENSORS
    if (short in found) != (long in found):
        missing = long if short in found else short
        yield f"has no {missing}, and has the factors of the other lengths of contexts: download it again"

"""What OpenVINO's reader of GGUF files computes rightly, and what it leaves out without a word.

The reader takes any keys and tensors, and makes a model of those that it knows. So a file is refused that has others: its answers
would be wrong. An architecture is listed if tests compare its logits with those of the original implementation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from staticllm.errors import ModelError, quoted, shown
from staticllm.model_files.gguf_header import GGUFHeader, kinds_of
from staticllm.model_files.gguf_tensors import (
    LayerTensors,
    head_size,
    num_heads,
    num_kv_heads,
    rotated_size,
    wrong_tensors,
)

EXPORT = "export the original model with `staticllm export`"
Windows = Literal["none", "all", "periodic"]
_PLAIN = LayerTensors()


@dataclass(frozen=True)
class GGUFArchitecture:
    """How a file of an architecture is computed, beyond what its keys say."""

    windows: Windows = "none"
    """Which layers see ``attention.sliding_window`` tokens; of ``period`` layers all but the last, if ``periodic``."""
    period: int = 0
    window_base: float | None = None
    """The base of the rotation in layers with windows, which then is not scaled, if the file does not say it."""
    period_unrotated: int = 0
    """Every layer of this number is not rotated."""
    normed_after_rotation: bool = False
    """Whether queries and keys are normed after they are rotated."""
    divides_logits: bool = False
    """Whether ``logit_scale`` divides, and the reader multiplies."""
    deep: int = 0
    """The number of layers of the one size whose attention is scaled by the embedding's part of a head."""
    keys: frozenset[str] = frozenset()
    """The keys that the reader applies beside those that all have."""
    needs: frozenset[str] = frozenset()
    """Keys without which other programs guess."""
    layers: LayerTensors = _PLAIN
    """The tensors of its layers."""
    split: str = ""
    """How texts are split before pairs of bytes are merged, if all vocabularies of the architecture are split in one way."""
    strips_markers: bool = False
    """Whether spaces behind markers of turns are no text in vocabularies with scores, which no key says."""


_MULTIPLIERS = frozenset(("embedding_scale", "residual_scale", "logit_scale"))
_CAPS = frozenset(("attn_logit_softcapping", "final_logit_softcapping"))
_WINDOW = frozenset(("attention.sliding_window",))
_HEAD_NORMS = LayerTensors(has_head_norms=True)
ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(windows="all"),
    "mistral3": GGUFArchitecture(
        windows="all",
        keys=frozenset(("attention.temperature_scale", "attention.temperature_length")),
        split="tekken",
    ),
    "qwen2": GGUFArchitecture(split="qwen2", layers=LayerTensors(has_biases=True)),
    "qwen3": GGUFArchitecture(split="qwen2", layers=_HEAD_NORMS),
    "phi3": GGUFArchitecture(
        windows="all", layers=LayerTensors(is_fused=True, may_bias_inner=False), strips_markers=True
    ),
    "gemma": GGUFArchitecture(layers=LayerTensors(may_bias_inner=False)),
    "gemma2": GGUFArchitecture(
        windows="periodic",
        period=2,
        deep=46,
        keys=_CAPS,
        needs=_CAPS | _WINDOW,
        layers=LayerTensors(has_post_norms=True, may_bias_inner=False),
    ),
    "gemma3": GGUFArchitecture(
        windows="periodic",
        period=6,
        window_base=10000.0,
        deep=62,
        keys=frozenset(("final_logit_softcapping", "rope.freq_base_swa")),
        needs=_WINDOW,
        layers=LayerTensors(has_head_norms=True, has_post_norms=True, may_bias_inner=False),
    ),
    "smollm3": GGUFArchitecture(period_unrotated=4, split="llama-bpe"),
    "hunyuan-dense": GGUFArchitecture(normed_after_rotation=True, layers=_HEAD_NORMS),
    "minicpm": GGUFArchitecture(divides_logits=True, keys=_MULTIPLIERS, needs=_MULTIPLIERS),
}
"""By ``general.architecture``."""
_EMBEDDERS = frozenset(
    (
        "bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "modern-bert", "neo-bert", "eurobert",
        "gemma-embedding", "t5encoder",
    )
)  # fmt: skip
"""Architectures that make no text."""
_KEYS = frozenset(
    (
        "context_length", "embedding_length", "feed_forward_length", "block_count", "vocab_size", "tensor_data_layout",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.scale", "attention.sliding_window",
        "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.attn_factor",
        "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier",
    )
)  # fmt: skip
"""The keys behind the architecture's name that all may have."""
_TEXTS = ("rope.scaling.type", "tensor_data_layout")
_BY_LAYER = ("feed_forward_length", "attention.head_count_kv")
"""Keys that may have a value for each layer, of which all must be the same."""
_NEEDED = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
_MOST_WHOLE, _MOST, _TINY = (1 << 31) - 1, 1e6, 1e-12
_WHOLE: Mapping[str, int] = {
    **dict.fromkeys((*_NEEDED[:-1], "attention.head_count_kv", "attention.key_length", "attention.value_length"), 1),
    **dict.fromkeys(("attention.sliding_window", "vocab_size", "rope.scaling.original_context_length", "expert_count"), 0),
    "rope.dimension_count": 2, "attention.temperature_length": 0,
}  # fmt: skip
"""Keys whose values are whole numbers, and the least of each."""
_POSITIVE = (
    "attention.layer_norm_rms_epsilon", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", *_MULTIPLIERS, *_CAPS,
)  # fmt: skip
_REAL: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(_POSITIVE, (_TINY, _MOST)),
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa"), (1.001, 1e12)),
    **dict.fromkeys(("rope.scaling.factor", "rope.scale_linear"), (1, _MOST)),
    "rope.scaling.yarn_ext_factor": (0, 1),
}  # fmt: skip
"""The least and the most of keys whose values are real numbers; 0 and a million of those that are not here."""
_OFF = ("rope.scaling.factor", "rope.scale_linear")
"""Keys that may also be 0, which is as if they were missing."""
_NEUTRAL: Mapping[str, Any] = {
    "attention.causal": True, "use_parallel_residual": True, **dict.fromkeys(_MULTIPLIERS, 1.0),
}  # fmt: skip
"""Values of other keys that change nothing; of those that are not here, 0, False and empty ones."""
_SCALINGS = ("none", "linear", "yarn", "longrope")
_WEIGHTS = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4",
)  # fmt: skip
"""The types of tensors that can be read."""
_EXPERTS = "_exps."
_TYPES = {
    "adapter": "a LoRA adapter: make adapter_model.safetensors of it, and give it to ADAPTERS",
    "mmproj": "the part of a model that sees images or hears: give the file of the language model",
    "imatrix": "statistics for quantisation: give the file of the model",
}
"""What the other values of ``general.type`` than ``model`` are, and what helps."""


def check_architecture(header: GGUFHeader) -> GGUFArchitecture:
    """Return how a file is computed.

    Raises:
        ModelError: it is no language model, or has what the reader leaves out.
    """
    reason = next(_reasons(header), None)
    if reason is not None:
        raise ModelError(f"{quoted(header.path)} {reason}")
    return ARCHITECTURES[header.architecture]


def architecture_of(header: GGUFHeader) -> GGUFArchitecture:
    """Return how a file that was checked is computed."""
    return ARCHITECTURES[header.architecture]


def _reasons(header: GGUFHeader) -> Iterator[str]:
    """Yield why a file cannot be read, and what helps."""
    kind = header.text("general.type", "model")
    if header.architecture == "clip":
        kind = "mmproj"
    if kind in _TYPES:
        yield f"is {_TYPES[kind]}"
    name = header.architecture
    if name and (name in _EMBEDDERS or header.own("pooling_type")):
        yield (
            f"is an embedding model or a reranker (architecture {shown(name)}), and GGUF files are read for generation only: "
            "make an OpenVINO model of the original with `staticllm export --task feature-extraction`, or text-classification"
        )
    if not name:
        yield "does not say its architecture (general.architecture): download another file of the model"
    if name not in ARCHITECTURES:
        yield f"has the architecture {shown(name)}, and {', '.join(ARCHITECTURES)} can be read: {EXPORT}"
    if not header.tensors:
        yield "has no weights: it is a vocabulary, give the file of the model"
    yield from _wrong_values(header)
    if any(_EXPERTS in tensor.name for tensor in header.tensors) or header.own("expert_count"):
        yield f"has layers of experts (architecture {shown(name)}), which OpenVINO's reader cannot save: {EXPORT}"
    others = [each for each in kinds_of(header) if each not in _WEIGHTS]
    if others:
        yield f"has weights of the type {', '.join(others)}, which cannot be read: take the model in Q4_K_M or Q8_0"
    for key, value in header.metadata.items():
        if key.startswith(f"{name}.") and not _is_applied(header, key.removeprefix(f"{name}."), value):
            yield f"has {shown(key)} {_text(value)}, which OpenVINO's reader leaves out: {EXPORT}"
    yield from wrong_tensors(header, ARCHITECTURES[name].layers, EXPORT)


def _text(value: Any) -> str:
    return shown(value.tolist() if isinstance(value, np.ndarray) else value)


def _is_applied(header: GGUFHeader, key: str, value: Any) -> bool:
    """Return whether a key is applied, or its value changes nothing."""
    architecture = ARCHITECTURES[header.architecture]
    if key in _KEYS and key != "attention.sliding_window":
        return key != "rope.scaling.type" or value in _SCALINGS
    if key == "attention.sliding_window":
        context = header.own("context_length")
        is_long = isinstance(context, int) and isinstance(value, int) and value >= context
        return architecture.windows != "none" or not value or is_long
    if key == "attention.sliding_window_pattern":
        return architecture.windows == "periodic" and isinstance(value, int) and value == architecture.period
    if key in architecture.keys:
        return True
    if key in _NEUTRAL:
        return not isinstance(value, np.ndarray) and bool(value == _NEUTRAL[key])
    return not np.any(value) if isinstance(value, np.ndarray) else not value


def _wrong_values(header: GGUFHeader) -> Iterator[str]:
    """Yield which keys have values of wrong types or sizes, for all that follows computes with them."""
    name = header.architecture
    architecture = ARCHITECTURES[name]
    for key in (*_KEYS, *architecture.keys, "expert_count"):
        value = header.own(key)
        if value is None and (key in _NEEDED or key in architecture.needs):
            yield f"has no {name}.{key}, which every file of this architecture must have: download a newer one"
        if value is not None and not _is_right(header, key, value):
            yield f"has {name}.{key} {_text(value)}, which OpenVINO's reader does not know: download it again"
    yield from _contradictions(header)


def _is_right(header: GGUFHeader, key: str, value: Any) -> bool:
    """Return whether the value of a known key has its type, and is within its limits."""
    if key in _TEXTS:
        return isinstance(value, str)
    if key == "rope.scaling.finetuned":
        return True
    if isinstance(value, np.ndarray):
        count = header.whole(key)
        return (
            key in _BY_LAYER
            and value.size == header.whole("block_count")
            and count is not None
            and count >= _WHOLE[key]
        )
    if key in _WHOLE:
        least = 1 if key in ARCHITECTURES[header.architecture].needs else _WHOLE[key]
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST_WHOLE
    lowest, most = _REAL.get(key, (0, _MOST))
    return isinstance(value, float) and (lowest <= value <= most or (value == 0 and key in _OFF))


def _contradictions(header: GGUFHeader) -> Iterator[str]:
    name = header.architecture
    heads, kv_heads, head, turned = (each(header) for each in (num_heads, num_kv_heads, head_size, rotated_size))
    embedding = header.whole("embedding_length") or 0
    if embedding % heads and not header.whole("attention.key_length"):
        yield f"has {name}.attention.head_count {heads}, which does not divide embedding_length {embedding}: download it again"
    if heads % kv_heads:
        yield f"has {name}.attention.head_count_kv {kv_heads}, which does not divide head_count {heads}: download it again"
    values = head_size(header, "attention.value_length")
    if values != head:
        yield (
            f"has keys and values of different sizes (attention.key_length {head}, value_length {values}), which OpenVINO's "
            f"reader does not know: {EXPORT}"
        )
    if turned % 2 or turned > head:
        yield (
            f"has {name}.rope.dimension_count {turned}, which must be even and at most the size of a head, {head}: "
            "download it again"
        )


def attention_scale(header: GGUFHeader) -> float:
    """Return by what the products of queries and keys are multiplied."""
    own = header.own("attention.scale")
    if isinstance(own, float) and own > 0:
        return own
    embedding = header.whole("embedding_length") or 0
    is_deep = header.whole("block_count") == ARCHITECTURES[header.architecture].deep
    size: float = embedding / num_heads(header) if is_deep else head_size(header)
    return 1 / math.sqrt(size)


def window_of(header: GGUFHeader) -> int | None:
    """Return the tokens that layers with sliding windows see; None without windows."""
    return header.whole("attention.sliding_window") or None


def has_window(header: GGUFHeader, layer: int) -> bool:
    """Return whether a layer has a sliding window."""
    architecture = ARCHITECTURES[header.architecture]
    is_periodic = architecture.windows == "periodic" and layer % architecture.period < architecture.period - 1
    return window_of(header) is not None and (architecture.windows == "all" or is_periodic)


def context_length(header: GGUFHeader) -> int | None:
    """Return the tokens up to which the model computes what the original computes.

    Behind the original context, some models scale queries by their positions, which is left out.
    """
    whole = header.whole("context_length")
    original = header.whole("rope.scaling.original_context_length")
    return min(whole, original) if header.own("attention.temperature_scale") and whole and original else whole


_LAYER = re.compile(r"blk\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Return the number of the layer in the name of a tensor or of a value."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None

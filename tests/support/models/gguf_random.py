"""Writes small GGUF files of any architecture with random weights."""

from __future__ import annotations

import gguf
import numpy as np
from support.models.gguf_files import add_vocabulary

WIDTH, HEADS, PAIRS, SIZE, VOCABULARY = 256, 8, 2, 32, 600
CONTEXT = 512
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
WINDOW = {"attention.sliding_window": 16}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
LONG = {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.19}
MINICPM = {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 4.0}
MINISTRAL = {**YARN, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1}
FACTORS = np.linspace(1, 8, SIZE // 2, dtype=np.float32)
RANDOM = {"Q2_K": (84, (80, 82)), "Q3_K": (110, (108,))}
"""Types that the library only reads: bytes per block of 256, and where its f16 scales are."""


def shapes_of(kind, layers, is_tied, heads=(HEADS, PAIRS)):
    """Return the shapes of an architecture's tensors by name. ``heads``: those of queries, and those of keys and values."""
    queries, pairs = heads
    found = {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,)}
    if not is_tied:
        found["output.weight"] = (VOCABULARY, WIDTH)
    wide = (queries + 2 * pairs) * SIZE
    for layer in range(layers):
        own = {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,), "ffn_down.weight": (WIDTH, WIDTH)}
        own["attn_output.weight"] = (WIDTH, queries * SIZE)
        if kind == "phi3":
            own |= {"attn_qkv.weight": (wide, WIDTH), "ffn_up.weight": (2 * WIDTH, WIDTH)}
        else:
            own |= {"ffn_up.weight": (WIDTH, WIDTH), "ffn_gate.weight": (WIDTH, WIDTH)}
            for letter, count in (("q", queries), ("k", pairs), ("v", pairs)):
                own[f"attn_{letter}.weight"] = (count * SIZE, WIDTH)
                if kind == "qwen2":
                    own[f"attn_{letter}.bias"] = (count * SIZE,)
        if kind in ("qwen3", "gemma3", "hunyuan-dense"):
            own |= {"attn_q_norm.weight": (SIZE,), "attn_k_norm.weight": (SIZE,)}
        if kind in ("gemma2", "gemma3"):
            own |= {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
        found |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return found


def packed(values, kind, random):
    """Return a matrix as bytes of a type."""
    if kind not in RANDOM:
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    size, halves = RANDOM[kind]
    data = random.integers(0, 256, (values.size // 256, size), np.uint8)
    for place in halves:
        scale = np.std(values) / 128 * random.uniform(0.5, 1.5, len(data))
        data[:, place : place + 2] = scale.astype(np.float16)[:, None].view(np.uint8)
    return data.reshape(*values.shape[:-1], -1)


def write_random(
    path, kind, *, layers=3, keys=(), tensors=(), is_tied=False, quantised="F32", change=dict, heads=(HEADS, PAIRS)
):
    """Write a file with more keys, behind the architecture's name, and more tensors. Keys that are None are left out.

    ``change``: a function from the shapes of its tensors by name to those that are written.
    """
    random = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, kind)
    given = {
        "context_length": CONTEXT, "embedding_length": WIDTH, "block_count": layers, "feed_forward_length": WIDTH,
        "attention.head_count": heads[0], "attention.head_count_kv": heads[1], "attention.key_length": SIZE,
        "attention.value_length": SIZE, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": SIZE,
        "rope.freq_base": 10000.0, **dict(keys),
    }  # fmt: skip
    for key, value in ((key, value) for key, value in given.items() if value is not None):
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(f"{kind}.{key}", value)
    add_vocabulary(writer, VOCABULARY)
    for name, shape in change(shapes_of(kind, layers, is_tied, heads)).items():
        values = random.normal(0, 1, shape).astype(np.float32)
        if len(shape) == 2:
            own = packed(values * 1.2 / shape[1] ** 0.5, quantised, random)
            writer.add_tensor(name, own, raw_dtype=gguf.GGMLQuantizationType[quantised])
        else:
            writer.add_tensor(name, values * 0.2 + ("norm" in name))
    for name, values in dict(tensors).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

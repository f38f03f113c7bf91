"""Writes the weights of a tiny OpenVINO model as a GGUF file, and gives the model the same, rounded weights: the reference."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import gguf
import numpy as np
import openvino as ov
from openvino import opset13 as ops

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "demo": "llama"}
"""What GGUF calls the architectures of models that are written, by the name of the model."""
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NORMS = {"llama": 2, "qwen2": 2, "qwen3": 2, "gemma2": 4}
NORM_NAMES = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
LAYER_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
RANDOM = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
"""Types that the library only reads: bytes per block of 256. Their blocks are random, with a scale that the model bears."""
BYTES = [chr(each) for each in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
"""256 letters for the bytes, as vocabularies of byte pairs have them; the order does not matter here."""


@dataclass
class Written:
    """A file, and the model that computes what it must compute."""

    path: object
    reference: ov.Model


def weights_of(model):
    """Return the places of a model's matrices by name: what reads each, and its values."""
    found = {}
    for node in model.get_ordered_ops():
        place = {"MatMul": 1, "Gather": 0}.get(node.get_type_name())
        if place is None:
            continue
        source = node.input_value(place)
        constant = source.get_node()
        while constant.get_type_name() in ("Convert", "Multiply", "Subtract", "Reshape"):
            constant = constant.input_value(0).get_node()
        name = constant.get_friendly_name().partition(".weight")[0]
        if constant.get_type_name() == "Constant" and name.startswith(("self.model.", "self.lm_head")):
            found.setdefault(name, []).append(node.input(place))
    return found


def values_of(port):
    """Return the numbers that a port reads, in f32."""
    part = ov.Model([ops.result(port.get_source_output())], [], "weights")
    compiled = ov.Core().compile_model(part, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return np.array(compiled({})[0], np.float32)


def rounded(values, kind, seed):
    """Return the bytes of a tensor in a type, and the numbers that they stand for."""
    if kind in RANDOM and values.shape[-1] % 256 == 0:
        data = random_blocks(values, kind, seed)
    else:
        kind = "Q8_0" if kind in RANDOM else kind
        data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    kind = gguf.GGMLQuantizationType[kind]
    return data, kind, gguf.quants.dequantize(data, kind).reshape(values.shape)


def random_blocks(values, kind, seed):
    """Return random blocks, whose f16 scales make numbers as large as those of ``values``."""
    random = np.random.default_rng(seed)
    size = RANDOM[kind]
    data = random.integers(0, 256, (values.size // 256, size), np.uint8)
    halves = (208,) if kind == "Q6_K" else (0, 2)
    for place in halves:
        scale = np.float16(np.std(values) / (64 * 32) * random.uniform(0.5, 1.5, len(data)))
        data[:, place : place + 2] = scale.astype(np.float16)[:, None].view(np.uint8)
    return data.reshape(*values.shape[:-1], -1)


def interleaved(values, heads):
    """Return the rows of queries or keys in the order in which GGUF's llama turns neighbours."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write(folder, path, name, kind):
    """Write the model in a folder as a GGUF file with matrices of a type, and return both."""
    model = ov.Core().read_model(folder / "openvino_model.xml")
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, config, architecture)
    restore_angles(model, config)
    places = weights_of(model)
    for seed, (place, ports) in enumerate(sorted(places.items())):
        add_matrix(writer, config, architecture, place, ports, kind, seed)
    add_norms(writer, config, architecture, norms_of(model))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.validate_nodes_and_infer_types()
    return Written(path, model)


def add_matrix(writer, config, architecture, place, ports, kind, seed):
    """Write one matrix, and let the model read what it stands for."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(
        place.rpartition(".")[2]
    )
    order = (lambda each: interleaved(each, heads)) if heads and architecture == "llama" else (lambda each: each)
    values = values_of(ports[0]) * scale_of(config, place)
    back = np.argsort(order(np.arange(len(values))[:, None])[:, 0])
    data, kind, numbers = rounded(np.ascontiguousarray(order(values)), kind, seed)
    writer.add_tensor(f"{gguf_name(place)}.weight", data, raw_dtype=kind)
    for port in ports:
        port.replace_source_output(
            ops.constant(np.ascontiguousarray(numbers[back] / scale_of(config, place))).output(0)
        )


def scale_of(config, place):
    """Return the factor of queries that a file cannot say: there they are always divided by the root of the head's size."""
    scalar = config.get("query_pre_attn_scalar") or head_size(config)
    return np.float32((head_size(config) / scalar) ** 0.5 if place.endswith("q_proj") else 1)


def gguf_name(place):
    if place.endswith("embed_tokens"):
        return "token_embd"
    if place.endswith("lm_head"):
        return "output"
    _, _, _, layer, *rest = place.split(".")
    return f"blk.{layer}.{NAMES['.'.join(rest)]}"


def restore_angles(model, config):
    """Give a model the frequencies of its rotation in f32, which exporters store in f16."""
    half = head_size(config) // 2
    exact = theta_of(config) ** (-np.arange(half) / half)
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant" and node.data.size == half and node.data.dtype.kind == "f":
            values = node.data.astype(np.float32)
            if np.allclose(values.reshape(-1), exact, rtol=2e-3):
                new = ops.convert(ops.constant(exact.reshape(values.shape).astype(np.float32)), "f32")
                for port in list(node.output(0).get_target_inputs()):
                    if port.get_node().get_type_name() == "Convert":
                        for reader in list(port.get_node().output(0).get_target_inputs()):
                            reader.replace_source_output(new.output(0))
                    else:
                        port.replace_source_output(new.output(0))


def theta_of(config):
    rope = config.get("rope_parameters") or {}
    return float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0)


def norms_of(model):
    """Return the weights of norms by GGUF's names; those of ones are not in a model."""
    found = {}
    for node in model.get_ordered_ops():
        match = re.search(r"layers\.(\d+)\.(\w+norm)/|model\.(norm)/", node.get_friendly_name())
        if node.get_type_name() == "Multiply" and match:
            values = [each.get_node() for each in node.input_values() if each.get_node().get_type_name() == "Constant"]
            if values and values[0].data.size > 1:
                layer, norm, _ = match.groups()
                name = "output_norm" if layer is None else f"blk.{layer}.{LAYER_NORMS[norm]}"
                found[name] = values[0].data.reshape(-1).astype(np.float32)
    return found


def add_norms(writer, config, architecture, known):
    ones = np.ones(config["hidden_size"], np.float32)
    size = head_size(config)
    writer.add_tensor("output_norm.weight", known.get("output_norm", ones))
    for layer in range(config["num_hidden_layers"]):
        for norm in NORM_NAMES[: NORMS[architecture]]:
            name = f"blk.{layer}.{norm}"
            writer.add_tensor(f"{name}.weight", known.get(name, ones))
        if architecture == "qwen3":
            for norm in ("attn_q_norm", "attn_k_norm"):
                writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(size, np.float32))
        if architecture == "qwen2":
            for part, heads in (
                ("q", "num_attention_heads"),
                ("k", "num_key_value_heads"),
                ("v", "num_key_value_heads"),
            ):
                writer.add_tensor(f"blk.{layer}.attn_{part}.bias", np.zeros(size * config[heads], np.float32))


def head_size(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def add_metadata(writer, config, architecture):
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_rope_dimension_count(head_size(config))
    writer.add_rope_freq_base(theta_of(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if architecture == "gemma2":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    add_vocabulary(writer, config["vocab_size"])


def add_vocabulary(writer, size):
    """Write a vocabulary of single bytes, a few pairs, and special tokens."""
    pairs = [(first, second) for first in BYTES[64:80] for second in BYTES[64:80]]
    tokens = [*BYTES, *("".join(pair) for pair in pairs)]
    special = ["<s>", "</s>", *(f"<unused{place}>" for place in range(size - len(tokens) - 2))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *special])
    writer.add_token_types([1] * len(tokens) + [3, 3] + [5] * (len(special) - 2))
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens) + 1)

"""Computes the logits of a decoder in a GGUF file with NumPy, from the file's numbers in f64: a reference for tests.

It follows what llama.cpp computes for these architectures, and was compared with transformers' models (largest difference 3e-6).
"""

from __future__ import annotations

import math

import gguf
import numpy as np

NEOX = ("qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3", "hunyuan-dense")
"""Architectures that turn the first half of a head against the second; the others turn neighbours."""


class Reference:
    """The model of a file."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.weights = {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            for tensor in reader.tensors
        }
        self.fields = {name: field.contents() for name, field in reader.fields.items() if "tokenizer" not in name}
        self.kind = self.fields["general.architecture"]
        self.heads = self.of("attention.head_count")
        self.pairs = int(np.ravel(self.of("attention.head_count_kv", self.heads))[0])
        self.size = self.of("attention.key_length", self.of("embedding_length") // self.heads)
        self.is_gemma = self.kind.startswith("gemma")

    def of(self, key, default=None):
        return self.fields.get(f"{self.kind}.{key}", default)

    def logits(self, tokens):
        """Return the logits ``[tokens, vocabulary]``."""
        hidden = self.weights["token_embd.weight"][np.array(tokens)]
        hidden = hidden * (math.sqrt(hidden.shape[1]) if self.is_gemma else self.of("embedding_scale", 1))
        factor = self.of("residual_scale", 1) if self.kind == "minicpm" else 1
        for layer in range(self.of("block_count")):
            read = self._norm(hidden, layer, "attn_norm")
            hidden = hidden + factor * self._post(self._attention(read, layer), layer, "post_attention_norm")
            read = self._norm(hidden, layer, "ffn_norm")
            hidden = hidden + factor * self._post(self._feed_forward(read, layer), layer, "post_ffw_norm")
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        found = self._rms(hidden) * self.weights["output_norm.weight"] @ head.T
        cap = self.of("final_logit_softcapping")
        found = np.tanh(found / cap) * cap if cap else found
        return found / self.of("logit_scale", 1) if self.kind == "minicpm" else found

    def _rms(self, values):
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + self.of("attention.layer_norm_rms_epsilon"))

    def _norm(self, values, layer, name):
        return self._rms(values) * self.weights[f"blk.{layer}.{name}.weight"]

    def _post(self, values, layer, name):
        return self._norm(values, layer, name) if f"blk.{layer}.{name}.weight" in self.weights else values

    def _linear(self, values, layer, name):
        bias = self.weights.get(f"blk.{layer}.{name}.bias", 0)
        return values @ self.weights[f"blk.{layer}.{name}.weight"].T + bias

    def _feed_forward(self, values, layer):
        up = self._linear(values, layer, "ffn_up")
        if f"blk.{layer}.ffn_gate.weight" in self.weights:
            gate = self._linear(values, layer, "ffn_gate")
        else:
            gate, up = np.split(up, 2, -1)
        tanh = np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
        active = 0.5 * gate * (1 + tanh) if self.is_gemma else gate / (1 + np.exp(-gate))
        return self._linear(active * up, layer, "ffn_down")

    def _attention(self, values, layer):
        rows = len(values)
        if f"blk.{layer}.attn_qkv.weight" in self.weights:
            ends = [self.heads * self.size, (self.heads + self.pairs) * self.size]
            parts = np.split(self._linear(values, layer, "attn_qkv"), ends, -1)
        else:
            parts = [self._linear(values, layer, f"attn_{letter}") for letter in "qkv"]
        query, key, value = (part.reshape(rows, -1, self.size) for part in parts)
        query, key = (self._turned(part, layer, letter) for part, letter in ((query, "q"), (key, "k")))
        copies = self.heads // self.pairs
        key, value = (part.repeat(copies, 1) for part in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) * (self.of("attention.scale") or self.size**-0.5)
        cap = self.of("attn_logit_softcapping")
        scores = np.tanh(scores / cap) * cap if cap else scores
        scores = np.where(self._seen(rows, layer), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self._linear(np.einsum("hqk,khd->qhd", weights, value).reshape(rows, -1), layer, "attn_output")

    def _is_windowed(self, layer):
        period = {"gemma2": 2, "gemma3": 6}.get(self.kind)
        return bool(self.of("attention.sliding_window")) and (period is None or layer % period < period - 1)

    def _seen(self, rows, layer):
        distance = np.arange(rows)[:, None] - np.arange(rows)
        window = self.of("attention.sliding_window") if self._is_windowed(layer) else rows
        return (distance >= 0) & (distance < window)

    def _turned(self, values, layer, letter):
        """Return queries or keys after their norm and their rotation, in the architecture's order."""
        norm = self.weights.get(f"blk.{layer}.attn_{letter}_norm.weight")
        is_late = self.kind == "hunyuan-dense"
        if norm is not None and not is_late:
            values = self._rms(values) * norm
        if self.kind != "smollm3" or (layer + 1) % 4:
            values = self._rotated(values, layer)
        return self._rms(values) * norm if norm is not None and is_late else values

    def _rotated(self, values, layer):
        size = self.of("rope.dimension_count", self.size)
        turn, magnitude = self._angles(size, layer, len(values))
        angles = np.arange(len(values))[:, None, None] * turn
        cos, sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude
        result = values.copy()
        halves = (slice(0, size // 2), slice(size // 2, size))
        first, second = halves if self.kind in NEOX else (slice(0, size, 2), slice(1, size, 2))
        result[..., first] = values[..., first] * cos - values[..., second] * sin
        result[..., second] = values[..., second] * cos + values[..., first] * sin
        return result

    def _angles(self, size, layer, count):
        half = np.arange(size // 2)
        if self.kind == "gemma3" and self._is_windowed(layer):
            return self.of("rope.freq_base_swa", 10000.0) ** (-2 * half / size), 1
        base = self.of("rope.freq_base", 10000.0)
        turn = base ** (-2 * half / size)
        is_long = count > (self.of("rope.scaling.original_context_length") or count)
        for name in ("rope_freqs.weight", f"rope_factors_{'long' if is_long else 'short'}.weight"):
            turn = turn / self.weights.get(name, 1)
        factor = self.of("rope.scaling.factor") or self.of("rope.scale_linear") or 1
        magnitude = self.of("rope.scaling.attn_factor", 1) * self.of("rope.scaling.yarn_attn_factor", 1)
        kind = self.of("rope.scaling.type", "linear")
        if kind != "yarn":
            return turn / (factor if kind == "linear" else 1), magnitude
        context = self.of("rope.scaling.original_context_length") or self.of("context_length")
        bounds = (self.of("rope.scaling.yarn_beta_fast", 32), self.of("rope.scaling.yarn_beta_slow", 1))
        ends = [size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in bounds]
        low = max(math.floor(ends[0]), 0)
        high = min(math.ceil(ends[1]), size - 1)
        kept = 1 - np.clip((half - low) / max(high - low, 0.001), 0, 1)
        kept = kept * self.of("rope.scaling.yarn_ext_factor", 1)
        scale = 0.1 * math.log(factor) + 1
        multiplier = self.of("rope.scaling.yarn_log_multiplier", 0)
        scale /= 0.1 * multiplier * math.log(factor) + 1 if multiplier else 1
        return turn / factor * (1 - kept) + turn * kept, scale * magnitude

"""Makes LoRA adapters as PEFT writes them, and models with an adapter folded into their weights, without any code of ours."""

from __future__ import annotations

import json
import shutil

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.passes import ConstantFolding, Manager

PREFIX = "base_model.model."
TYPES = {"F32": np.float32, "F16": np.float16}
STRENGTH = 0.6
"""The size of an adapter's change beside the layer's own output: answers differ, and numbers stay ordinary."""


def safetensors_bytes(tensors, types=None):
    """Return a file with these tensors; ``types``: name → F32, F16 or BF16."""
    header, data = {}, b""
    for name, values in tensors.items():
        kind = (types or {}).get(name, "F32")
        if kind == "BF16":
            part = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            part = np.ascontiguousarray(values, TYPES[kind]).tobytes()
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    return len(text).to_bytes(8, "little") + text + data


def linear_layers(model):
    """Return path of a module → its MatMul, read from the names that optimum-intel gives."""
    found = {}
    for node in model.get_ordered_ops():
        path, _, op = node.get_friendly_name().removeprefix("__module.").partition("/")
        weights = node.input_value(1).get_partial_shape() if node.get_type_name() == "MatMul" else None
        if weights is not None and "::" in op and weights.is_static and len(weights) == 2:
            found[path] = node
    return found


def sizes_of(node):
    """Return the numbers of values that a linear layer takes and returns."""
    first, second = node.input_value(1).get_shape()
    return (second, first) if node.get_attributes()["transpose_b"] else (first, second)


class Lora:
    """Random matrices for the layers of a model whose path ends in one of ``targets``."""

    def __init__(self, model_path, targets, rank=4, seed=0, alpha=8.0, dtype="F32"):
        self.rank, self.alpha, self.dtype = rank, alpha, dtype
        random = np.random.default_rng(seed)
        self.matrices = {}
        model = ov.Core().read_model(model_path / "openvino_model.xml")
        for path, node in linear_layers(model).items():
            if path.endswith(targets):
                in_size, out_size = sizes_of(node)
                a = random.standard_normal((rank, in_size)) / np.sqrt(in_size)
                b = random.standard_normal((out_size, rank)) * STRENGTH / np.sqrt(rank)
                self.matrices[path] = (a.astype(np.float32), b.astype(np.float32))
        assert self.matrices, f"{model_path} has no layer {targets}"

    def tensors(self):
        found = {}
        for path, (a, b) in self.matrices.items():
            found[f"{PREFIX}{path}.lora_A.weight"], found[f"{PREFIX}{path}.lora_B.weight"] = a, b
        return found

    def save(self, folder, **config):
        """Write a directory of PEFT, and return it; ``config`` are further fields of its configuration."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = self.tensors()
        data = safetensors_bytes(tensors, dict.fromkeys(tensors, self.dtype))
        (folder / "adapter_model.safetensors").write_bytes(data)
        content = {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "bias": "none", **config}
        (folder / "adapter_config.json").write_text(json.dumps(content))
        return folder

    @property
    def scale(self):
        """What PEFT multiplies the matrices with."""
        return self.alpha / self.rank


def merged_model(model_path, folder, *adapters):
    """Write a model with ``(lora, factor)`` pairs folded into its weights, in f32, and return its directory."""
    shutil.copytree(model_path, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    model = ov.Core().read_model(model_path / "openvino_model.xml")
    layers = linear_layers(model)
    for path in sorted({path for lora, _ in adapters for path in lora.matrices}):
        node = layers[path]
        total = constant_value(node.input_value(1))
        for lora, factor in adapters:
            if path in lora.matrices:
                a, b = lora.matrices[path]
                delta = np.float32(factor) * (b @ a)
                total += delta if node.get_attributes()["transpose_b"] else delta.T
        node.input(1).replace_source_output(ops.constant(total).output(0))
    model.validate_nodes_and_infer_types()
    (folder / "openvino_model.xml").unlink()
    (folder / "openvino_model.bin").unlink()
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


def constant_value(output):
    """Return the value of constants and of what is computed from them, such as decompressed weights, in f32."""
    part = ov.Model([ops.result(ops.convert(output, "f32"))], []).clone()
    manager = Manager()
    manager.register_pass(ConstantFolding())  # compiling a program for each constant takes ten times as long
    manager.run_passes(part)
    return np.array(part.get_results()[0].input_value(0).get_node().data)

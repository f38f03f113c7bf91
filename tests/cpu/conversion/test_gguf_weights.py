"""Tests the weights of converted GGUF files: the numbers of the file, in types that CPUs and NPUs take."""

from __future__ import annotations

import gguf
import numpy as np
import openvino as ov
import pytest
from support.models.gguf_files import values_of
from support.models.gguf_numpy import Reference
from support.models.gguf_random import write_random

from staticllm.compiler_passes.conversion.gguf_layers import WEIGHT
from staticllm.compiler_passes.conversion.gguf_model import convert
from staticllm.compiler_passes.decoder import DECODER_NPU
from staticllm.compiler_passes.graph.compressed_matrix import find_compressed_matrices
from staticllm.compiler_passes.lower import LoweringOptions, lower
from staticllm.core import Variant
from staticllm.model_files.converted import converted_size
from staticllm.model_files.gguf_header import read_gguf_header
from tests.cpu.conversion.test_gguf import logits_of

KINDS = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "MXFP4")
TAKEN = {"f32", "f16", "bf16", "i64", "i32", "i8", "u8", "i4", "u4", "boolean"}
"""Types that exports have as well."""
TOKENS = np.random.default_rng(5).integers(0, 500, 40).tolist()


def model_of(path, folder):
    folder.mkdir()
    convert(path, folder)
    return ov.Core().read_model(folder / "openvino_model.xml")


def types_of(model):
    return {n.get_element_type().get_type_name() for n in model.get_ordered_ops() if n.get_type_name() == "Constant"}


def randomize(path, name, fill):
    """Overwrite the bytes of a tensor."""
    header = read_gguf_header(path)
    tensor = next(each for each in header.tensors if each.name == name)
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(fill(tensor.num_bytes))


def exponents(num_bytes):
    """Return blocks of MXFP4 with each number and powers of two of all sizes that f32 has without a loss."""
    random = np.random.default_rng(2)
    blocks = random.integers(0, 256, (num_bytes // 17, 17), np.uint8)
    blocks[:, 0] = random.permutation(np.resize(np.arange(2, 250, dtype=np.uint8), len(blocks)))
    return blocks.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_file_in_types_that_npus_take(kind, tmp_path):
    path = write_random(tmp_path / "model.gguf", "qwen3", layers=1, quantised=kind, is_tied=True)
    model = model_of(path, tmp_path / "made")
    file = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    compared = 0
    for node in model.get_ordered_ops():
        name = node.get_friendly_name().removeprefix(WEIGHT)
        if name == node.get_friendly_name() or name not in file or node.get_type_name() == "Constant":
            continue
        port = next(iter(node.output(0).get_target_inputs()))
        expected = gguf.quants.dequantize(file[name].data, file[name].tensor_type)
        found = values_of(port).reshape(expected.shape)
        assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max(), name
        compared += len(expected.shape) > 1
    assert compared == 8  # seven matrices of a layer, and the embeddings
    assert types_of(model) <= TAKEN
    size = (tmp_path / "made" / "openvino_model.bin").stat().st_size
    assert 0.98 <= size / converted_size(read_gguf_header(path)) <= 1.02
    lowered = lower(model, LoweringOptions(256), DECODER_NPU).specialise(Variant(2, 8))
    assert types_of(lowered) <= TAKEN
    assert not [matrix for matrix in find_compressed_matrices(lowered) if matrix.zero_point is not None]


def test_mxfp4_keeps_every_number_and_every_scale_exactly(tmp_path):
    path = write_random(tmp_path / "model.gguf", "qwen3", layers=1, quantised="MXFP4", is_tied=True)
    randomize(path, "blk.0.ffn_up.weight", exponents)
    model = model_of(path, tmp_path / "made")
    tensor = next(each for each in gguf.GGUFReader(path).tensors if each.name == "blk.0.ffn_up.weight")
    expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert len(np.unique(np.abs(expected))) > 500
    node = next(node for node in model.get_ordered_ops() if node.get_friendly_name() == f"{WEIGHT}blk.0.ffn_up.weight")
    found = values_of(next(iter(node.output(0).get_target_inputs()))).reshape(expected.shape)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("architecture,kind", [("qwen3", "MXFP4"), ("qwen3", "Q2_K"), ("phi3", "Q2_K")])
def test_logits_are_those_of_the_file(architecture, kind, tmp_path):
    path = write_random(tmp_path / "model.gguf", architecture, layers=2, quantised=kind)
    expected = Reference(path).logits(TOKENS)
    found = logits_of(model_of(path, tmp_path / "made"), TOKENS, (20, 21))[0]
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()

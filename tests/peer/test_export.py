"""Tests exports of small models by the real optimum, in the environment that STATICLLM_EXPORT_PYTHON names.

They equal optimum's own exports, and staticllm computes with them what transformers computes with the originals.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from staticllm import StaticEmbeddingPipeline, StaticLLMPipeline, StaticRerankPipeline
from staticllm.errors import ModelError
from staticllm.export.environment import check_python
from staticllm.export.exporter import ExportRequest, export

PYTHON = os.environ.get("STATICLLM_EXPORT_PYTHON")
MAKER = Path(__file__).resolve().parents[1] / "support" / "export" / "reference_models.py"
F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
NAMES = ("llama", "qwen2")
COMPRESSED = {
    "int8": {"device": "NPU", "weights": "int8"},
    "int8-asymmetric": {"device": "CPU"},
    "int4": {"device": "NPU"},
    "int4-channel": {"device": "NPU", "group_size": -1},
    "int4-64-asymmetric": {"device": "CPU", "weights": "int4", "group_size": 64},
}
"""Optimum's exports that `reference_models.py` makes → what is asked for to get the same."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None, reason="STATICLLM_EXPORT_PYTHON names no environment: `staticllm export --setup` makes one"
    ),
]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """The folder with the models, their references and optimum's exports."""
    check_python(Path(PYTHON))
    folder = tmp_path_factory.mktemp("originals")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(
        [PYTHON, str(MAKER), str(folder)], check=True, env={**environment, "HF_HUB_OFFLINE": "1"}, timeout=600
    )
    return folder


def exported(originals, name, label, **options):
    """Return the model directory of an original, which is exported once."""
    target = originals / f"ours-{name}-{label}"
    if not target.is_dir():
        export(ExportRequest(str(originals / name), target, **options), Path(PYTHON))
    return target


def constants_of(folder):
    """Return the type, shape and digest of each constant of a model, in some order."""
    model = ov.Core().read_model(folder / "openvino_model.xml")
    nodes = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    return sorted(
        (str(node.get_element_type()), tuple(node.shape), sha256(np.ascontiguousarray(node.data).tobytes()).hexdigest())
        for node in nodes
    )


@pytest.mark.parametrize(
    ("name", "label"), [*(("llama", label) for label in COMPRESSED), ("qwen2", "int8-asymmetric"), ("qwen2", "int4")]
)
def test_compressed_weights_are_those_of_optimum_bit_for_bit(name, label, originals):
    ours = constants_of(exported(originals, name, label, **COMPRESSED[label]))
    assert ours == constants_of(originals / f"{name}-{label}")
    bits = {kind for kind, shape, _ in ours if len(shape) > 1}
    assert any("4" in kind for kind in bits if "int" in kind) == label.startswith("int4"), bits


@pytest.mark.parametrize("name", NAMES)
def test_uncompressed_weights_are_those_of_the_original(name, originals):
    from safetensors.numpy import load_file

    weights = load_file(originals / name / "model.safetensors")
    kinds = {"f32": np.float32, "f16": np.float16} if name == "llama" else {"f32": np.float32}
    for label, kind in kinds.items():
        folder = exported(originals, name, label, weights=label)
        found = {digest for _, _, digest in constants_of(folder)}
        for tensor in weights.values():
            if tensor.ndim == 2:
                assert sha256(tensor.astype(kind).tobytes()).hexdigest() in found


@pytest.mark.parametrize("name", NAMES)
def test_f32_has_the_logits_and_tokens_of_transformers(name, originals):
    folder = exported(originals, name, "f32", weights="f32")
    reference = np.load(originals / f"{name}.npz")
    ids = reference["ids"]
    request = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", F32).create_infer_request()
    inputs = {
        "input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64),
        "position_ids": np.arange(len(ids))[None], "beam_idx": np.zeros(1, np.int32),
    }  # fmt: skip
    logits = request.infer(inputs)["logits"][0]
    assert np.abs(logits - reference["logits"]).max() < 1e-4 * np.ptp(reference["logits"])
    with StaticLLMPipeline(folder, "CPU", MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=32, **F32) as pipe:
        count = len(reference["tokens"])
        found = pipe.generate(ids, max_new_tokens=count, ignore_eos=True, do_sample=False).tokens[0]
        assert list(found) == reference["tokens"].tolist()
        tokenizer = pipe.get_tokenizer()
        assert tokenizer.encode("A fox sat on the hill.").input_ids.data[0].tolist() == ids.tolist()
        turns = [{"role": "user", "content": "A fox sat on the hill."}]
        assert tokenizer.apply_chat_template(turns, add_generation_prompt=True) == str(reference["chat"])


@pytest.mark.parametrize("label", ["int4", "int8-asymmetric", "f16"])
def test_every_kind_of_weights_answers(label, originals):
    options = COMPRESSED.get(label, {"weights": label})
    folder = exported(originals, "llama", label, **options)
    with StaticLLMPipeline(folder, "CPU", MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=32, **F32) as pipe:
        assert len(pipe.generate(np.array([3, 4, 5]), max_new_tokens=8, ignore_eos=True).tokens[0]) == 8


def test_an_embedder_keeps_its_pooling_and_prompts(originals):
    folder = exported(originals, "encoder", "f16")
    reference = np.load(originals / "encoder.npz")
    with StaticEmbeddingPipeline(folder, "CPU", INFERENCE_PRECISION_HINT="f32") as pipe:
        vector = np.array(pipe.embed_query("A fox sat on the hill."))
    assert float(vector @ reference["query"]) > 0.999


def test_an_architecture_that_optimum_does_not_know_is_one_line(originals, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"architectures": ["NewForCausalLM"], "model_type": "newest"}')
    (source / "model.safetensors").write_bytes((originals / "llama" / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"cannot be exported: .*newest") as error:
        export(ExportRequest(str(source), tmp_path / "out"), Path(PYTHON))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_code_of_the_model_is_not_run_unasked(originals, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    mark = tmp_path / "was_run"
    (source / "code.py").write_text(f"open({str(mark)!r}, 'w')\nfrom transformers import LlamaConfig as Own\n")
    config = '{"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoConfig": "code.Own"}}'
    (source / "config.json").write_text(config)
    (source / "model.safetensors").write_bytes((originals / "llama" / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="add --trust-remote-code"):
        export(ExportRequest(str(source), tmp_path / "out"), Path(PYTHON))
    assert not mark.exists()


def test_a_name_in_the_cache_needs_no_network(originals, tmp_path, monkeypatch):
    cached = tmp_path / "hub" / "models--owner--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(originals / "llama", cached / "snapshots" / ("0" * 40))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    export(ExportRequest("owner/name", tmp_path / "out"), Path(PYTHON))
    assert constants_of(tmp_path / "out") == constants_of(originals / "llama-int4")
    with pytest.raises(ModelError, match="'owner/other' is no folder, and cannot be had from Hugging Face") as error:
        export(ExportRequest("owner/other", tmp_path / "none"), Path(PYTHON))
    assert "\n" not in str(error.value)


def test_a_reranker_has_the_scores_of_transformers(originals):
    folder = exported(originals, "reranker", "f32", weights="f32")
    reference = np.load(originals / "reranker.npz")
    with StaticRerankPipeline(folder, "CPU", INFERENCE_PRECISION_HINT="f32") as pipe:
        found = dict(pipe.rerank("fox", ["A fox.", "Rain."]))
    assert np.abs(np.array([found[0], found[1]]) - reference["scores"]).max() < 1e-4


def test_this_process_has_no_torch(originals):
    exported(originals, "llama", "f32", weights="f32")
    assert not {"torch", "transformers", "optimum"} & set(sys.modules)

"""Tests adapters of PEFT with GGUF files: logits are those of the model with the adapter in its weights."""

from __future__ import annotations

import shutil

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from support.models import gguf_files
from support.models.gguf_random import CAPS, HEADS, LINEAR, MINICPM, PAIRS, WINDOW, write_random
from support.models.lora_files import Lora, constant_value, linear_layers

from staticllm import Adapter, AdapterConfig, AdapterError, StaticLLMPipeline
from staticllm.kvcache.sequence import Conditions
from staticllm.model_files.converted import converted
from staticllm.model_files.gguf_header import read_gguf_header
from staticllm.pipelines.generation.genai_adapters import adapter_set_of
from staticllm.pipelines.loading.load import load
from staticllm.properties import resolve
from tests.cpu.conversion.test_gguf import EXACT, logits_of

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
TOKENS = np.random.default_rng(5).integers(0, 250, 24).tolist()
SIZES = {"MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 32}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def adapted_logits(folder, adapter, factor=1.0, programs="shared"):
    """Return the logits after the last token, by programs whose inputs are the adapter's matrices."""
    config = AdapterConfig([(Adapter(adapter), factor)])
    given = resolve({**SIZES, **EXACT, "PROGRAMS": programs, "ADAPTERS": adapter_set_of(config)}, set(EXACT))
    runner = load(folder, "CPU", given.config).runner
    sequence = runner.cache.open(Conditions((factor,)))
    return np.array(runner.prefill(sequence, TOKENS))


def check(found, wanted, plain):
    size = np.abs(wanted).max()
    assert np.abs(found - wanted).max() <= 1e-4 * size
    assert np.abs(found - plain).max() > 0.02 * size, "the adapter changes nothing"


def merge_into_model(model, lora):
    """Add an adapter to the weights of a model of the exporter, in place."""
    for path, node in linear_layers(model).items():
        if path in lora.matrices:
            a, b = lora.matrices[path]
            delta = np.float32(lora.scale) * (b @ a)
            own = constant_value(node.input_value(1))
            total = own + (delta if node.get_attributes()["transpose_b"] else delta.T)
            node.input(1).replace_source_output(ops.constant(total).output(0))
    model.validate_nodes_and_infer_types()


@pytest.mark.parametrize("targets", [TARGETS, ("q_proj",), ("k_proj",), ("lm_head",)], ids="-".join)
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen2", "qwen3"))]
)
def test_an_adapter_of_the_export_changes_its_file_alike(name, targets, model_path, tmp_path):
    written = gguf_files.write(model_path(name), tmp_path / "model.gguf", name, "F32")
    lora = Lora(model_path(name), targets)
    plain = logits_of(written.reference, TOKENS, ())[0, -1]
    merge_into_model(written.reference, lora)
    wanted = logits_of(written.reference, TOKENS, ())[0, -1]
    check(adapted_logits(converted(written.path), lora.save(tmp_path / "adapter")), wanted, plain)


KINDS = {
    "llama": {}, "mistral3": {}, "minicpm": {"keys": MINICPM}, "smollm3": {"layers": 4}, "hunyuan-dense": {}, "qwen2": {},
    "qwen3": {},
    "gemma": {"is_tied": True}, "gemma2": {"keys": {**WINDOW, **CAPS}, "is_tied": True},
    "gemma3": {"keys": {**WINDOW, **LINEAR, "rope.freq_base": 1e6}, "layers": 7, "is_tied": True}, "phi3": {},
}  # fmt: skip
"""Architectures, and their files."""
PERMUTED = {"llama", "mistral3", "minicpm", "smollm3"}
"""Architectures whose files have queries and keys in the order in which neighbours turn."""
TENSORS = {"gate_up_proj": "ffn_up", **{module.rpartition(".")[2]: name for module, name in gguf_files.NAMES.items()}}


def merge_into_file(path, target, lora, kind):
    """Copy a file in f32 with an adapter in its weights."""
    shutil.copyfile(path, target)
    tensors = {each.name: each for each in read_gguf_header(target).tensors}
    for module, (a, b) in lora.matrices.items():
        _, _, layer, *_, last = module.split(".")
        heads = {"q_proj": HEADS, "k_proj": PAIRS}.get(last, 0)
        delta = np.float32(lora.scale) * (b @ a)
        if heads and kind in PERMUTED:
            delta = gguf_files.interleaved(delta, heads)
        tensor = tensors[f"blk.{layer}.{TENSORS[last]}.weight"]
        values = np.memmap(target, "<f4", "r+", tensor.offset, tuple(reversed(tensor.shape)))
        values += delta
        values.flush()
    return target


@pytest.mark.parametrize(
    "kind", [kind if kind in ("llama", "smollm3") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_an_adapter_computes_what_a_file_with_it_in_its_weights_computes(kind, tmp_path):
    path = write_random(tmp_path / "model.gguf", kind, **KINDS[kind])
    folder = converted(path)
    lora = Lora(folder, ("o_proj", "gate_up_proj", "down_proj") if kind == "phi3" else TARGETS)
    merged = converted(merge_into_file(path, tmp_path / "merged.gguf", lora, kind))
    core = ov.Core()
    wanted, plain = (
        logits_of(core.read_model(each / "openvino_model.xml"), TOKENS, ())[0, -1] for each in (merged, folder)
    )
    check(adapted_logits(folder, lora.save(tmp_path / "adapter")), wanted, plain)


def test_a_file_with_compressed_weights_takes_an_adapter(model_path, tmp_path):
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "Q8_0")
    lora = Lora(model_path("llama"), TARGETS)
    merge_into_model(written.reference, lora)
    adapter = Adapter(lora.save(tmp_path / "adapter"))
    with StaticLLMPipeline(written.path, "CPU", adapters=AdapterConfig([(adapter, 1.0)]), **SIZES, **EXACT) as pipe:
        found = pipe.generate(np.array([TOKENS]), max_new_tokens=8, ignore_eos=True).tokens[0]
    tokens = list(TOKENS)
    for token in found:
        best = logits_of(written.reference, tokens, ())[0, -1]
        assert best[token] >= best.max() - 1e-4 * np.abs(best).max()
        tokens.append(token)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_an_adapter_of_a_model_with_images_finds_the_text_part(prefix, tmp_path):
    path = write_random(tmp_path / "model.gguf", "mistral3", layers=1)
    lora = Lora(converted(path), ("q_proj", "down_proj"))
    plain = adapted_logits(converted(path), lora.save(tmp_path / "plain"))
    lora.matrices = {path.replace("model.", prefix, 1): each for path, each in lora.matrices.items()}
    found = adapted_logits(converted(path), lora.save(tmp_path / "adapter"))
    assert np.abs(found - plain).max() <= 1e-4 * np.abs(plain).max()


@pytest.mark.parametrize("mode", ["separate", "blocks"])
def test_programs_of_each_mode_take_an_adapter(mode, model_path, tmp_path):
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "F32")
    lora = Lora(model_path("llama"), TARGETS)
    adapter = lora.save(tmp_path / "adapter")
    shared, own = (adapted_logits(converted(written.path), adapter, programs=each) for each in ("shared", mode))
    assert np.abs(own - shared).max() <= 1e-4 * np.abs(shared).max()


def test_an_adapter_is_folded_into_the_weights(model_path, tmp_path):
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "F32")
    adapter = Adapter(Lora(model_path("llama"), TARGETS).save(tmp_path / "adapter"))
    found = []
    for config in (AdapterConfig(adapter), AdapterConfig(adapter, AdapterConfig.Mode.MODE_FUSE)):
        with StaticLLMPipeline(written.path, "CPU", adapters=config, **SIZES, **EXACT) as pipe:
            found.append(pipe.generate(np.array([TOKENS]), max_new_tokens=12, ignore_eos=True).tokens)
    assert found[0] == found[1]


def test_a_module_that_a_file_has_in_parts_is_named(tmp_path):
    path = write_random(tmp_path / "model.gguf", "phi3")
    lora = Lora(converted(path), ("o_proj",))
    lora.matrices = {path.replace("o_proj", "qkv_proj"): each for path, each in lora.matrices.items()}
    adapter = Adapter(lora.save(tmp_path / "adapter"))
    with pytest.raises(
        AdapterError, match=r"'model.layers.0.self_attn.qkv_proj', .* \(it has k_proj, o_proj, q_proj, v_proj there\)"
    ):
        StaticLLMPipeline(path, "CPU", adapters=AdapterConfig([(adapter, 1.0)]), **SIZES)

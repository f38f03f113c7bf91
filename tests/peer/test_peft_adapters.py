"""Adapters that PEFT itself makes and saves: the tokens of the merged model in f32, and one line for what is more than LoRA.

Needs PyTorch, transformers, optimum-intel and PEFT, which the library's own environment does not have.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest

from staticllm import Adapter, AdapterError, StaticLLMPipeline
from staticllm.pipelines.diagnostics.reference import EXACT

NEEDED = ("torch", "transformers", "optimum", "peft")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} is not installed")

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj"],  # several projections in one matrix
    "gpt2": ["c_attn", "c_proj", "c_fc"],  # matrices the other way round, with biases
}
CHANGED = {"llama": ("q_proj", "down_proj"), "phi3": ("qkv_proj", "o_proj"), "gpt2": ("c_attn", "c_fc")}
CONFIGS = {
    "patterns": lambda first, second: {
        "rank_pattern": {first: 2, rf"[01]\..*\.{second}": 7},
        "alpha_pattern": {rf"[02]\..*\.{first}": 3, second: 20},
    },
    "rank-stabilized": lambda first, second: {"use_rslora": True, "alpha_pattern": {first: 2}, "rank_pattern": {second: 3}},
    "some layers": lambda first, second: {"layers_to_transform": [1, 3], "init_lora_weights": "gaussian"},
}  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Return a function from an architecture to a directory with it for PyTorch, and one for OpenVINO, both in f32."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import make_zoo
    finally:
        sys.path.remove(str(SCRIPTS))
    folder, known = tmp_path_factory.mktemp("originals"), {}

    def get(name):
        if name not in known:
            known[name] = folder / name / "torch", folder / name / "openvino"
            make_zoo.save_random(name, known[name][0], {})
            make_zoo.export(*known[name], dtype="fp32")
        return known[name]

    get.export = make_zoo.export
    return get


def adapted(torch_path, seed=0, **config):
    """Return a model of PEFT whose matrices are random."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(torch_path, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.6 / parameter.shape[-1] ** 0.5)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "patterns"), ("llama", "some layers"), ("phi3", "patterns"), ("gpt2", "rank-stabilized")],
)
def test_an_adapter_of_peft_gives_the_tokens_of_the_merged_model(name, kind, originals, tmp_path):
    torch_path, path = originals(name)
    model = adapted(torch_path, target_modules=TARGETS[name], **CONFIGS[kind](*CHANGED[name]))
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "torch")
    originals.export(tmp_path / "torch", tmp_path / "merged", dtype="fp32")
    merged = genai.LLMPipeline(tmp_path / "merged", "CPU", **EXACT)
    plain = genai.LLMPipeline(path, "CPU", **EXACT)
    options = {"max_new_tokens": 24, "ignore_eos": True}
    with StaticLLMPipeline(path, "CPU", adapters=genai.AdapterConfig(Adapter(tmp_path / "adapter")), **EXACT) as ours:
        random, differences = np.random.default_rng(1), 0
        for length in (5, 40, 130):
            ids = random.integers(3, 2000, (1, length))
            expected = merged.generate(ov.Tensor(ids), **options).tokens
            assert ours.generate(ids, **options).tokens == expected, length
            without = plain.generate(ov.Tensor(ids), **options).tokens
            assert ours.generate(ids, adapters=genai.AdapterConfig(), **options).tokens == without
            differences += without != expected
    assert differences == 3


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"bias": "all"}, "bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True, "target_modules": ["c_attn"]}, "lora_bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"trainable_token_indices": [3, 4]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embedding"),
    ],
)
def test_what_is_more_than_matrices_gets_one_line(config, said, originals, tmp_path):
    is_biased = "lora_bias" in config  # PEFT has it only where the layer has a bias
    torch_path, _ = originals("gpt2" if is_biased else "llama")
    try:
        model = adapted(torch_path, **{"target_modules": ["q_proj", "v_proj"], **config})
    except (TypeError, ValueError) as error:
        pytest.skip(f"this version of PEFT has no {config}: {error}")
    model.save_pretrained(tmp_path)
    with pytest.raises(AdapterError) as caught:
        Adapter(tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_model_gets_one_line(originals, tmp_path):
    adapted(originals("llama")[0], target_modules=["q_proj"]).save_pretrained(tmp_path)
    for name in ("phi3", "gpt2"):
        with pytest.raises(AdapterError, match="another model"):
            StaticLLMPipeline(originals(name)[1], "CPU", adapters=genai.AdapterConfig(Adapter(tmp_path)))

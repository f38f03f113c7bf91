"""Compares LoRA adapters with those of ``openvino_genai.LLMPipeline``: the same objects give the same tokens in f32."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from support.models.lora_files import Lora

from staticllm import StaticLLMPipeline
from staticllm.pipelines.diagnostics.reference import EXACT

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
NAMES = [
    "llama",
    "qwen2",
    pytest.param("demo", marks=pytest.mark.slow),
    pytest.param("mistral", marks=pytest.mark.slow),
]


def files_of(model_path, folder):
    loras = [Lora(model_path, TARGETS, rank=4, seed=1), Lora(model_path, TARGETS[:3], rank=2, seed=2)]
    return [str(lora.save(folder / str(index)) / "adapter_model.safetensors") for index, lora in enumerate(loras)]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_with_each_combination_of_adapters(name, model_path, prompt_of, tmp_path):
    adapters = [genai.Adapter(path) for path in files_of(model_path(name), tmp_path)]
    config = genai.AdapterConfig(adapters)
    ours = StaticLLMPipeline(model_path(name), "CPU", adapters=config, **EXACT)
    theirs = genai.LLMPipeline(model_path(name), "CPU", adapters=config, **EXACT)
    first, second = adapters
    configs = [
        None,
        *map(genai.AdapterConfig, ([(first, 0.75)], [(first, 0.5), (second, 1.0)], [second])),
        genai.AdapterConfig(),
    ]
    found = []
    for length in (5, 40):
        for seed, each in enumerate(configs):  # another prompt each time: GenAI reuses prefixes of other adapters
            ids = np.array([prompt_of(length, seed)])
            options = {"max_new_tokens": 24, "ignore_eos": True, **({} if each is None else {"adapters": each})}
            found.append(ours.generate(ids, **options).tokens[0])
            assert found[-1] == theirs.generate(ov.Tensor(ids), **options).tokens[0], f"prompt of {length} tokens"
    assert len(set(map(tuple, found))) > 6

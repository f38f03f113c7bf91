"""Models with LoRA adapters for tests: the adapters' files, and the tokens of models with the adapters in their weights."""

from __future__ import annotations

from support.helpers import PROMPT, tokens_of
from support.models.lora_files import Lora, merged_model

from staticllm import AdapterConfig
from staticllm.pipelines.diagnostics.reference import StatefulReference

TARGETS = {
    "demo": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "llama": ("q_proj", "v_proj", "down_proj", "lm_head"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "qwen2": ("q_proj", "k_proj", "v_proj", "up_proj"),
    "gpt_neox": ("query_key_value", "dense"),
    "lfm2": ("in_proj", "q_proj", "w1"),
}
"""The layers that the adapters of a model change: merged and single projections, with and without a bias, and a head."""
COUNT = 12


class Models:
    """A model, two adapters for it, and the tokens of merged models."""

    def __init__(self, path, targets, folder):
        self.path, self.folder = path, folder
        self.loras = [Lora(path, targets, rank=4, seed=1), Lora(path, targets[:2], rank=2, seed=2, alpha=3.0)]
        self.directories = [lora.save(folder / f"lora{index}") for index, lora in enumerate(self.loras)]
        self._references, self._tokens = {}, {}

    def files(self):
        return [folder / "adapter_model.safetensors" for folder in self.directories]

    def reference(self, *factors):
        """Return the original with the adapters folded in with these factors."""
        if not any(factors):
            factors = ()
        if factors not in self._references:
            folder = self.folder / f"merged{len(self._references)}"
            path = merged_model(self.path, folder, *zip(self.loras, factors, strict=False)) if factors else self.path
            self._references[factors] = StatefulReference(path)
        return self._references[factors]

    def tokens(self, *factors, prompt=PROMPT, count=COUNT):
        key = (factors, tuple(prompt), count)
        if key not in self._tokens:
            self._tokens[key] = self.reference(*factors).greedy(prompt, count)
        return self._tokens[key]


def answer(pipe, adapters=None, prompt=PROMPT, count=COUNT):
    return tokens_of(pipe, prompt, count, **({} if adapters is None else {"adapters": adapters}))


def config_of(handles, factors):
    return AdapterConfig(list(zip(handles, factors, strict=False)))

"""Tests ``staticllm compile --adapter``: the set serves adapters of these shapes."""

from __future__ import annotations

import zipfile

import pytest
from support.command_line import in_here
from support.helpers import PROMPT, tokens_of
from support.models.lora_files import Lora

from staticllm import Adapter, AdapterConfig, StaticLLMPipeline

pytestmark = pytest.mark.usefixtures("shared_programs")


def test_a_compiled_set_serves_adapters_of_its_shapes(zoo, tmp_path, original):
    model, target = zoo / "llama", tmp_path / "set.blob"
    first, second = (Lora(model, ("q_proj",), seed=seed).save(tmp_path / str(seed)) for seed in (1, 2))
    sizes = ["--max-prompt-len", 64, "--min-response-len", 32, "--precision", "f32", "--kv-precision", "f32"]
    done = in_here("compile", model, "--export-blob", target, "--adapter", first, *sizes)
    assert done.returncode == 0, done.stderr
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    with StaticLLMPipeline(
        model, "CPU", adapters=AdapterConfig(Adapter(second)), BLOB_PATH=target, **properties
    ) as pipe:
        assert tokens_of(pipe, adapters=AdapterConfig()) == original(model).greedy(PROMPT, 12)
        assert tokens_of(pipe) != tokens_of(pipe, adapters=AdapterConfig())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--adapter", "nothing.safetensors"], "nothing.safetensors"), (["--adapter", "LORA", "--verify"], "--verify")],
)
def test_impossible_adapters_get_one_line(arguments, message, zoo, tmp_path):
    lora = Lora(zoo / "llama", ("q_proj",)).save(tmp_path / "lora")
    given = [lora if argument == "LORA" else argument for argument in arguments]
    done = in_here("compile", zoo / "llama", "--export-blob", tmp_path / "set", *given)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_encoders_take_no_adapters(root, zoo, tmp_path):
    lora = Lora(zoo / "llama", ("q_proj",)).save(tmp_path / "lora")
    with zipfile.ZipFile(root / "tests" / "_encoders" / "bert.zip") as archive:
        archive.extractall(tmp_path / "bert")
    model = next((tmp_path / "bert").rglob("openvino_model.xml")).parent
    done = in_here("compile", model, "--export-blob", tmp_path / "set", "--adapter", lora)
    assert done.returncode == 1
    assert "--adapter" in done.stderr

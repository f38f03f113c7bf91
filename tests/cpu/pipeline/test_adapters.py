"""Tests LoRA adapters: each request gets the tokens of a model with its adapters in the weights, whatever shares its calls."""

from __future__ import annotations

import threading

import numpy as np
import openvino as ov
import pytest
from support.helpers import PROMPT, SHORT, one_line
from support.models.adapter_models import COUNT, TARGETS, answer, config_of
from support.models.lora_files import Lora, merged_model

from staticllm import (
    Adapter,
    AdapterConfig,
    AdapterError,
    BlobError,
    SnapshotError,
    StaticLLMPipeline,
)
from staticllm.kvcache.sequence import Conditions
from staticllm.pipelines.diagnostics.reference import StatefulReference
from staticllm.pipelines.generation.genai_adapters import adapter_set_of
from staticllm.pipelines.loading.load import load
from staticllm.pipelines.scheduling.planner import POLICIES
from staticllm.properties import resolve
from tests.support.inside import launched_of

NAMES = [
    "demo",
    "llama",
    "gpt2",
    "qwen2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_neox", "lfm2")),
]


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_computes_what_merged_weights_compute(name, models_of):
    models = models_of(name)
    first, second = map(Adapter, models.files())
    with StaticLLMPipeline(models.path, "CPU", adapters=AdapterConfig([first, second]), **SHORT) as pipe:
        for factors in ((1.0, 0.0), (0.0, 1.0), (0.75, 0.5), (0.0, 0.0)):
            config = AdapterConfig([(first, factors[0]), (second, factors[1])])
            assert answer(pipe, config) == models.tokens(*factors), factors
        assert answer(pipe) == models.tokens(1.0, 1.0)
        assert answer(pipe, AdapterConfig()) == models.tokens()
    assert len({tuple(models.tokens(*factors)) for factors in ((1.0, 0.0), (0.0, 1.0), (0.75, 0.5), ())}) == 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["shared", "separate", "blocks"])
def test_logits_are_those_of_merged_weights(name, mode, models_of):
    models = models_of(name)
    config = AdapterConfig([(Adapter(path), 1.0) for path in models.files()])
    properties = {**SHORT, "PROGRAMS": mode, "PREFILL_ROWS": [16], "ADAPTERS": adapter_set_of(config)}
    given = resolve(properties, {"INFERENCE_PRECISION_HINT"})
    runner = load(models.path, "CPU", given.config).runner
    for factors in ((0.75, 0.0), (0.5, 1.0), ()):
        reference, sequence = models.reference(*factors), runner.cache.open(Conditions(factors))
        reference.reset()
        for logits, tokens in ((runner.prefill(sequence, PROMPT[:16]), PROMPT[:16]), (None, [7])):
            ours = runner.decode(sequence, 7) if logits is None else logits
            theirs = reference.logits(tokens)[-1]
            assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, np.abs(theirs).max())
        runner.cache.close(sequence)


@pytest.mark.skipif("BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"), reason="no bf16 here")
def test_programs_in_bf16_have_matrices_in_bf16(llama):
    config = AdapterConfig([(Adapter(path), 1.0) for path in llama.files()])
    given = resolve(
        {"ADAPTERS": adapter_set_of(config), "INFERENCE_PRECISION_HINT": "bf16"}, {"INFERENCE_PRECISION_HINT"}
    )
    loaded = load(llama.path, "CPU", given.config)
    assert loaded.programs.shape.adapter_type == "bf16"
    distances = []
    for factors in ((0.5, 1.0), ()):
        reference = llama.reference(*factors)
        reference.reset()
        theirs = reference.logits(PROMPT)[-1]
        ours = loaded.runner.prefill(loaded.runner.cache.open(Conditions(factors)), PROMPT)
        distances.append(np.abs(ours - theirs).max() / np.abs(theirs).max())
    assert distances[0] < max(0.05, 3 * distances[1])


def test_a_directory_of_peft_has_its_own_scale(llama, tmp_path):
    """A file is multiplied by alpha alone, as in GenAI; a directory also by lora_alpha / r, or by lora_alpha / sqrt(r)."""
    lora = llama.loras[0]
    stable = Adapter(lora.save(tmp_path / "stable", use_rslora=True))
    own = {next(iter(lora.matrices)): 4.0}
    patterned = Adapter(lora.save(tmp_path / "patterned", lora_alpha=8.0, alpha_pattern=own))
    plain = Adapter(llama.directories[0])
    with StaticLLMPipeline(llama.path, "CPU", adapters=AdapterConfig([plain, stable, patterned]), **SHORT) as pipe:
        assert lora.scale == 2.0
        assert answer(pipe, AdapterConfig(plain)) == llama.tokens(2.0, 0.0)
        assert answer(pipe, AdapterConfig(plain, 0.5)) == llama.tokens(1.0, 0.0)
        assert answer(pipe, AdapterConfig(stable, 0.5)) == llama.tokens(2.0, 0.0)  # 8 / sqrt(4) / 2
    (adapter,) = adapter_set_of(AdapterConfig(patterned)).adapters
    assert sorted({layer.scale for layer in adapter.layers.values()}) == [1.0, 2.0]


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_matrices_of_other_types_are_read(dtype, llama, tmp_path):
    lora = Lora(llama.path, ("q_proj",), seed=3, dtype=dtype)
    for path, (a, b) in lora.matrices.items():  # numbers that the type holds exactly
        lora.matrices[path] = tuple((np.float32(np.round(each * 16)) / 16) for each in (a, b))
    folder = lora.save(tmp_path / "lora")
    expected = StatefulReference(merged_model(llama.path, tmp_path / "merged", (lora, 1.0))).greedy(PROMPT, COUNT)
    with StaticLLMPipeline(
        llama.path, "CPU", adapters=AdapterConfig(Adapter(folder / "adapter_model.safetensors")), **SHORT
    ) as pipe:
        assert answer(pipe) == expected


CHOICES = ((1.0, 0.0), (), (0.0, 1.0), (0.5, 0.5), (1.0, 0.0), (0.25, 0.0))
"""The factors of requests that run together: no two that follow each other have the same."""


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_requests_with_different_adapters_share_calls(policy, llama, handles):
    """With few slots, requests are swapped and preempted; each still has the tokens of its own adapters."""
    config = {**SHORT, "MAX_NUM_SEQS": 3, "KV_SLOTS": 110, "HOST_KV_SLOTS": 120, "GAP_MS": 5, "SCHEDULER": policy}
    prompts = [PROMPT[: 25 - 3 * index] for index in range(len(CHOICES))]
    with StaticLLMPipeline(llama.path, "CPU", adapters=AdapterConfig(handles), **config) as pipe:
        are_all_there = threading.Event()
        with pipe.record() as trace:
            pipe.engine.call_soon(are_all_there.wait)
            requests = [
                pipe.submit(np.array(prompt), adapters=config_of(handles, factors), max_new_tokens=24, ignore_eos=True)
                for prompt, factors in zip(prompts, CHOICES, strict=True)
            ]
            are_all_there.set()
            found = [list(request.result().tokens[0]) for request in requests]
    expected = [
        llama.tokens(*factors, prompt=prompt, count=24) for prompt, factors in zip(prompts, CHOICES, strict=True)
    ]
    assert found == expected
    assert policy == "decode_first" or max(len(step.decode) for step in trace.steps) == 3
    assert policy == "decode_first" or any(step.swapped or step.preempted for step in trace.steps)


def test_neighbours_with_adapters_do_not_change_a_row(adapted_pipe, llama):
    """At one program shape, a row without adapters is bit-identical to what it is beside rows with adapters."""
    runner = adapted_pipe.engine.runner
    alone, beside = (logits_beside(adapted_pipe, factors) for factors in ((), (3.0, 2.0)))
    assert np.array_equal(alone, beside)
    assert runner.cache.slots.num_used == 0


def logits_beside(pipe, factors):
    from staticllm.core import Variant
    from staticllm.kvcache.step import Segment

    def run():
        runner = pipe.engine.runner
        pipe.engine.core.device.kv_manager.prefix.offload_for(runner.cache.num_slots + 1)
        variant = min(each for each in runner.programs if each.sequences > 1 and each.rows >= 16)
        assert isinstance(variant, Variant)
        mine, other = runner.cache.open(), runner.cache.open(Conditions(factors))
        segments = [Segment(mine, np.array(PROMPT[:8])), Segment(other, np.array(PROMPT[8:14]))]
        logits = runner.run(variant, segments).segments[0].logits.copy()
        for sequence in (mine, other):
            runner.cache.close(sequence)
        return logits

    return pipe.engine.run_between_steps(run)


def test_prefixes_are_shared_only_among_the_same_adapters(adapted_pipe, llama, handles):
    prompt = list(range(100, 148))
    for factors in ((1.0, 0.0), (), (0.5, 0.0), (1.0, 0.0), ()):
        expected = llama.tokens(*factors, prompt=prompt)
        handle = adapted_pipe.submit(
            np.array(prompt), adapters=config_of(handles, factors), max_new_tokens=COUNT, ignore_eos=True
        )
        assert list(handle.result().tokens[0]) == expected
    cached = [
        adapted_pipe.generate(np.array(prompt), adapters=config_of(handles, factors), max_new_tokens=1)
        for factors in ((1.0, 0.0), (0.125, 0.0))
    ]
    assert [each.perf_metrics.get_num_cached_tokens() > 0 for each in cached] == [True, False]


def test_a_snapshot_belongs_to_its_adapters(llama, handles, tmp_path):
    file, prompt = tmp_path / "snapshot", np.array(PROMPT)
    with StaticLLMPipeline(llama.path, "CPU", adapters=AdapterConfig(handles[0], 0.5), **SHORT) as pipe:
        expected = answer(pipe)
        assert pipe.save_snapshot(file, prompt) >= len(PROMPT)
    with StaticLLMPipeline(llama.path, "CPU", adapters=AdapterConfig(handles[0], 0.5), **SHORT) as pipe:
        assert pipe.load_snapshot(file) >= len(PROMPT)
        assert answer(pipe) == expected == llama.tokens(0.5, 0.0)
        assert answer(pipe, AdapterConfig()) == llama.tokens()
    for adapters in ({}, {"adapters": AdapterConfig(handles[0], 0.75)}):
        with StaticLLMPipeline(llama.path, "CPU", **adapters, **SHORT) as pipe, pytest.raises(SnapshotError) as caught:
            pipe.load_snapshot(file)
        assert "adapters" in one_line(caught)


def test_a_blob_set_serves_every_adapter_of_its_layout(llama, tmp_path):
    """The matrices are inputs, so that other adapters of the same shapes compile nothing."""
    path, blobs = llama.path, tmp_path / "set.blob"
    other = Lora(path, TARGETS["llama"], rank=4, seed=9)
    expected = StatefulReference(merged_model(path, tmp_path / "merged", (other, 1.0))).greedy(PROMPT, COUNT)
    first, second = Adapter(llama.directories[0]), Adapter(other.save(tmp_path / "other") / "adapter_model.safetensors")
    with StaticLLMPipeline(
        path, "CPU", adapters=AdapterConfig(first), BLOB_PATH=blobs, EXPORT_BLOB=True, **SHORT
    ) as pipe:
        assert answer(pipe) == llama.tokens(2.0, 0.0)
    with StaticLLMPipeline(path, "CPU", adapters=AdapterConfig(second), BLOB_PATH=blobs, **SHORT) as pipe:
        assert answer(pipe) == expected
        assert answer(pipe, AdapterConfig()) == llama.tokens()
    for adapters in ({}, {"adapters": AdapterConfig(Adapter(llama.directories[1]))}):
        with pytest.raises(BlobError) as caught:
            StaticLLMPipeline(path, "CPU", BLOB_PATH=blobs, **adapters, **SHORT)
        assert "adapters" in one_line(caught)


def test_a_cache_has_one_set_for_a_layout(llama, tmp_path):
    other = Lora(llama.path, TARGETS["llama"], rank=4, seed=9).save(tmp_path / "other")
    cache = {"CACHE_DIR": str(tmp_path / "cache"), "PROGRAMS": "shared", **SHORT}
    origins = []
    for adapters in (
        {"adapters": AdapterConfig(Adapter(llama.files()[0]))},
        {"adapters": AdapterConfig(Adapter(other))},
        {},
    ):
        with StaticLLMPipeline(llama.path, "CPU", **adapters, **cache) as pipe:
            origins.append(launched_of(pipe).loaded.programs_from)
            assert answer(pipe, AdapterConfig()) == llama.tokens()
    assert origins == ["compiled", "cache", "compiled"]


def test_fused_adapters_are_part_of_the_weights(llama, handles, tmp_path):
    blobs, fused = tmp_path / "set.blob", AdapterConfig(handles[0], 0.75, AdapterConfig.Mode.MODE_FUSE)
    with StaticLLMPipeline(llama.path, "CPU", adapters=fused, BLOB_PATH=blobs, EXPORT_BLOB=True, **SHORT) as pipe:
        assert answer(pipe) == answer(pipe, AdapterConfig(handles[0], 0.75)) == llama.tokens(0.75, 0.0)
        assert not launched_of(pipe).loaded.programs.shape.adapted
        for config in (AdapterConfig(), AdapterConfig(handles[0], 0.5)):
            with pytest.raises(AdapterError, match="MODE_FUSE") as caught:
                answer(pipe, config)
            one_line(caught)
        assert answer(pipe) == llama.tokens(0.75, 0.0)
    with StaticLLMPipeline(llama.path, "CPU", adapters=fused, BLOB_PATH=blobs, **SHORT) as pipe:
        assert answer(pipe) == llama.tokens(0.75, 0.0)
    with pytest.raises(BlobError) as caught:
        other = AdapterConfig(handles[0], 0.5, AdapterConfig.Mode.MODE_FUSE)
        StaticLLMPipeline(llama.path, "CPU", adapters=other, BLOB_PATH=blobs, **SHORT)
    assert "adapters" in one_line(caught)


def test_compressed_weights_cannot_take_an_adapter_in(models_of):
    models = models_of("demo")
    fused = AdapterConfig(Adapter(models.files()[0]), AdapterConfig.Mode.MODE_FUSE)
    with pytest.raises(AdapterError, match="MODE_FUSE") as caught:
        StaticLLMPipeline(models.path, "CPU", adapters=fused, **SHORT)
    one_line(caught)

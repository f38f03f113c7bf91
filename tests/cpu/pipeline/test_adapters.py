"""Tests LoRA adapters: each request gets the tokens of a model with its adapters in the weights, whatever shares its calls."""

from __future__ import annotations

import json
import shutil
import threading

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from helpers import PROMPT, SHORT, one_line, tokens_of
from lora_files import PREFIX, Lora, merged_model, safetensors_bytes

from staticllm import (
    Adapter,
    AdapterConfig,
    AdapterError,
    BlobError,
    ConfigError,
    SnapshotError,
    StaticLLMPipeline,
    draft_model,
)
from staticllm.pipelines.diagnostics.reference import StatefulReference
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.pipelines.generation.genai_adapters import adapter_set_of
from staticllm.pipelines.model_loader.load import load
from staticllm.pipelines.scheduling.planner import POLICIES
from staticllm.properties import resolve
from staticllm.testing import fake_answer
from staticllm.testing.pipeline import fake_pipeline

TARGETS = {
    "demo": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "llama": ("q_proj", "v_proj", "down_proj", "lm_head"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "qwen2": ("q_proj", "k_proj", "v_proj", "up_proj"),
    "gpt_neox": ("query_key_value", "dense"),
    "lfm2": ("in_proj", "q_proj", "w1"),
}
"""The layers that the adapters of a model change: merged and single projections, with and without a bias, and a head."""
NAMES = [
    "demo",
    "llama",
    "gpt2",
    "qwen2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_neox", "lfm2")),
]
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


@pytest.fixture(scope="module")
def models_of(model_path, tmp_path_factory):
    known = {}

    def models(name):
        if name not in known:
            known[name] = Models(model_path(name), TARGETS[name], tmp_path_factory.mktemp(name))
        return known[name]

    return models


@pytest.fixture(scope="module")
def llama(models_of):
    return models_of("llama")


@pytest.fixture(scope="module")
def handles(llama):
    return [Adapter(path) for path in llama.files()]


@pytest.fixture(scope="module")
def pipe(llama, handles):
    with StaticLLMPipeline(llama.path, "CPU", adapters=AdapterConfig(handles), **SHORT) as pipe:
        yield pipe


def answer(pipe, adapters=None, prompt=PROMPT, count=COUNT):
    return tokens_of(pipe, prompt, count, **({} if adapters is None else {"adapters": adapters}))


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
@pytest.mark.parametrize("mode", ["shared", "separate"])
def test_logits_are_those_of_merged_weights(name, mode, models_of):
    models = models_of(name)
    config = AdapterConfig([(Adapter(path), 1.0) for path in models.files()])
    properties = {**SHORT, "PROGRAMS": mode, "PREFILL_ROWS": [16], "ADAPTERS": adapter_set_of(config)}
    given = resolve(properties, {"INFERENCE_PRECISION_HINT"})
    runner = load(models.path, "CPU", given.config).runner
    for factors in ((0.75, 0.0), (0.5, 1.0), ()):
        reference, sequence = models.reference(*factors), runner.cache.open(factors)
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
        ours = loaded.runner.prefill(loaded.runner.cache.open(factors), PROMPT)
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


def config_of(handles, factors):
    return AdapterConfig(list(zip(handles, factors, strict=False)))


def test_neighbours_with_adapters_do_not_change_a_row(pipe, llama):
    """At one program shape, a row without adapters is bit-identical to what it is beside rows with adapters."""
    runner = pipe.engine.runner
    alone, beside = (logits_beside(pipe, factors) for factors in ((), (3.0, 2.0)))
    assert np.array_equal(alone, beside)
    assert runner.cache.slots.num_used == 0


def logits_beside(pipe, factors):
    from staticllm.core import Variant
    from staticllm.kvcache.step import Segment

    def run():
        runner = pipe.engine.runner
        pipe.engine.kv_manager.prefix.offload_for(runner.cache.num_slots + 1)
        variant = min(each for each in runner.programs if each.sequences > 1 and each.rows >= 16)
        assert isinstance(variant, Variant)
        mine, other = runner.cache.open(), runner.cache.open(factors)
        segments = [Segment(mine, np.array(PROMPT[:8])), Segment(other, np.array(PROMPT[8:14]))]
        logits = runner.run(variant, segments).segments[0].logits.copy()
        for sequence in (mine, other):
            runner.cache.close(sequence)
        return logits

    return pipe.engine.run_between_steps(run)


def test_prefixes_are_shared_only_among_the_same_adapters(pipe, llama, handles):
    prompt = list(range(100, 148))
    for factors in ((1.0, 0.0), (), (0.5, 0.0), (1.0, 0.0), ()):
        expected = llama.tokens(*factors, prompt=prompt)
        handle = pipe.submit(
            np.array(prompt), adapters=config_of(handles, factors), max_new_tokens=COUNT, ignore_eos=True
        )
        assert list(handle.result().tokens[0]) == expected
    cached = [
        pipe.generate(np.array(prompt), adapters=config_of(handles, factors), max_new_tokens=1)
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
    cache = {"CACHE_DIR": str(tmp_path / "cache"), **SHORT}
    origins = []
    for adapters in (
        {"adapters": AdapterConfig(Adapter(llama.files()[0]))},
        {"adapters": AdapterConfig(Adapter(other))},
        {},
    ):
        with StaticLLMPipeline(llama.path, "CPU", **adapters, **cache) as pipe:
            origins.append(pipe._launched.loaded.origin)
            assert answer(pipe, AdapterConfig()) == llama.tokens()
    assert origins == ["compiled", "cache", "compiled"]


def test_fused_adapters_are_part_of_the_weights(llama, handles, tmp_path):
    blobs, fused = tmp_path / "set.blob", AdapterConfig(handles[0], 0.75, AdapterConfig.Mode.MODE_FUSE)
    with StaticLLMPipeline(llama.path, "CPU", adapters=fused, BLOB_PATH=blobs, EXPORT_BLOB=True, **SHORT) as pipe:
        assert answer(pipe) == answer(pipe, AdapterConfig(handles[0], 0.75)) == llama.tokens(0.75, 0.0)
        assert not pipe._launched.loaded.programs.shape.adapted
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


@pytest.mark.parametrize("mode", ["MODE_AUTO", "MODE_DYNAMIC", "MODE_STATIC_RANK", "MODE_STATIC"])
def test_all_other_modes_use_inputs(mode, llama, handles):
    config = AdapterConfig(handles[0], 0.5, getattr(AdapterConfig.Mode, mode))
    with StaticLLMPipeline(llama.path, "CPU", adapters=config, **SHORT) as pipe:
        assert answer(pipe) == llama.tokens(0.5, 0.0)
        assert answer(pipe, AdapterConfig(handles[0], 1.0)) == llama.tokens(1.0, 0.0)


def test_genais_own_objects_are_taken(llama):
    """Also copies of them: an AdapterConfig and a GenerationConfig give back other objects than they were given."""
    first, second = (genai.Adapter(str(path)) for path in llama.files())
    in_memory = genai.Adapter(ov.Tensor(np.frombuffer(llama.files()[1].read_bytes(), np.uint8).copy()))
    config = genai.AdapterConfig()
    config.add(first, 0.75)
    config.add(second)
    with StaticLLMPipeline(llama.path, "CPU", {**SHORT, "adapters": config}) as pipe:
        assert answer(pipe) == llama.tokens(0.75, 1.0)
        generation = genai.GenerationConfig()
        generation.adapters = genai.AdapterConfig([(first, 1.0)])
        generation.max_new_tokens, generation.ignore_eos = COUNT, True
        assert list(pipe.generate(np.array(PROMPT), generation).tokens[0]) == llama.tokens(1.0, 0.0)
        assert answer(pipe, genai.AdapterConfig(in_memory)) == llama.tokens(
            0.0, 1.0
        )  # the same numbers, another object
        assert answer(pipe, genai.AdapterConfig(genai.Adapter(str(llama.files()[0])), 0.5)) == llama.tokens(0.5, 0.0)
        own = pipe.get_generation_config()
        assert [alpha for _, alpha in own.adapters.get_adapters_and_alphas()] == [0.75, 1.0]
        pipe.set_generation_config(generation)
        assert answer(pipe) == llama.tokens(1.0, 0.0)


def test_mistakes_with_requests_get_one_line(pipe, llama, handles, tmp_path):
    stranger = Adapter(Lora(llama.path, ("q_proj",), seed=5).save(tmp_path / "stranger"))
    gone = tmp_path / "gone.safetensors"
    shutil.copyfile(llama.files()[0], gone)
    unread = genai.Adapter(str(gone))
    gone.unlink()
    for value, kind in (
        (AdapterConfig(stranger), AdapterError),
        (genai.AdapterConfig(unread), AdapterError),
        (handles[0], ConfigError),
        ("lora", ConfigError),
        (AdapterConfig(handles[0], float("nan")), ConfigError),
        (AdapterConfig(handles[0], float("inf")), ConfigError),
        (AdapterConfig(Adapter.__mro__[1]()), AdapterError),
    ):
        with pytest.raises(kind) as caught:
            answer(pipe, value)
        one_line(caught)
    assert answer(pipe, AdapterConfig(handles[0])) == llama.tokens(1.0, 0.0)
    with StaticLLMPipeline(llama.path, "CPU", **SHORT) as plain:
        with pytest.raises(AdapterError, match="without adapters") as caught:
            answer(plain, AdapterConfig(handles[0]))
        one_line(caught)
        assert answer(plain, AdapterConfig()) == llama.tokens()


def test_adapters_that_do_not_fit_the_model_get_one_line(llama, tmp_path):
    path = next(iter(llama.loras[0].matrices))
    a, b = llama.loras[0].matrices[path]
    cases = {
        "no linear layer": {f"{PREFIX}model.layers.9.mlp.up_proj": (a, b)},
        "another model": {PREFIX + path: (a[:, :-1], b)},
        "rank": {PREFIX + path: (np.zeros((600, a.shape[1]), np.float32), np.zeros((b.shape[0], 600), np.float32))},
    }
    for index, (message, layers) in enumerate(cases.items()):
        handles = []
        for number in range(2):
            file = tmp_path / f"{index}-{number}.safetensors"
            tensors = {
                f"{name}.lora_{side}.weight": value + number
                for name, pair in layers.items()
                for side, value in zip("AB", pair, strict=True)
            }
            file.write_bytes(safetensors_bytes(tensors))
            handles.append(Adapter(file))
        with pytest.raises(AdapterError, match=message) as caught:
            StaticLLMPipeline(llama.path, "CPU", adapters=AdapterConfig(handles), **SHORT)
        one_line(caught)


def test_adapters_do_not_go_to_the_daemon(llama, handles):
    with pytest.raises(ConfigError, match="daemon") as caught:
        StaticLLMPipeline(llama.path, "CPU", adapters=AdapterConfig(handles[0]), daemon=True)
    one_line(caught)


def test_programs_without_adapters_have_none_of_their_inputs(llama):
    with StaticLLMPipeline(llama.path, "CPU", **SHORT) as pipe:
        compiled = next(iter(pipe._launched.loaded.programs.compiled.values()))
    assert not [name for port in compiled.inputs for name in port.get_names() if name.startswith("adapter")]


def test_a_fake_pipeline_tells_adapters_apart(llama, handles):
    with fake_pipeline(adapters=AdapterConfig(handles)) as pipe:
        for factors in ((1.0, 0.0), (0.5, 1.0), ()):
            found = answer(pipe, config_of(handles, factors), count=5)
            assert found == fake_answer(PROMPT, 5, vocab_size=pipe.vocab_size, adapters=factors)[len(PROMPT) :]


def test_requests_with_adapters_survive_the_way_to_another_process():
    request = EngineRequest((1, 2), adapters=(0.5, 0.0))
    plain = json.loads(json.dumps(request.to_dict()))
    assert EngineRequest.from_dict(plain).adapters == (0.5, 0.0)


WAYS = {
    "answers": {"do_sample": True, "num_return_sequences": 3, "rng_seed": 5, "temperature": 1.2},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "prompt lookup": {"max_ngram_size": 2, "num_assistant_tokens": 3},
    "long conversations": {"overflow": "shift", "max_new_tokens": 90},
    "moved keys": {"overflow": "context_shift", "max_new_tokens": 90},
}
"""Ways of generating that fork, reorder, cut or move the slots of a sequence."""


@pytest.fixture(scope="module")
def merged_pipe(llama):
    llama.reference(0.5, 1.0)
    folder = llama.folder / f"merged{list(llama._references).index((0.5, 1.0))}"
    with StaticLLMPipeline(folder, "CPU", **SHORT) as pipe:
        yield pipe


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_generating_keeps_its_adapters(way, pipe, merged_pipe, handles):
    """Beside other requests with other adapters, and compared with a pipeline of merged weights."""
    prompt, options = (
        np.array([*PROMPT[:9], *PROMPT[:9], *PROMPT[:4]]),
        {"max_new_tokens": 16, "ignore_eos": True, **WAYS[way]},
    )
    other = pipe.submit(prompt, adapters=AdapterConfig(handles[0]), max_new_tokens=40, ignore_eos=True)
    found = pipe.generate(prompt, adapters=config_of(handles, (0.5, 1.0)), **options)
    other.result()
    expected = merged_pipe.generate(prompt, **options)
    assert found.tokens == expected.tokens
    assert found.tokens != pipe.generate(prompt, adapters=AdapterConfig(), **options).tokens


def test_a_draft_model_has_no_adapters_and_guesses_all_the_same(llama, handles):
    """The original drafts for requests with adapters, whose tokens differ, and for requests without."""
    with StaticLLMPipeline(
        llama.path, "CPU", adapters=AdapterConfig(handles), draft_model=draft_model(llama.path), **SHORT
    ) as pipe:
        for factors in ((0.5, 1.0), (), (1.0, 0.0)):
            found = pipe.generate(
                np.array(PROMPT), adapters=config_of(handles, factors), max_new_tokens=24, ignore_eos=True
            )
            assert list(found.tokens[0]) == llama.tokens(*factors, count=24)
        assert pipe.stats().drafted_tokens

"""Tests programs that were written for ``openvino_genai.LLMPipeline``: their arguments, results and metrics."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import openvino as ov
import openvino.properties as props
import openvino.properties.hint as hints
import openvino_genai as genai
import pytest

from staticllm import DecodedResults, StaticLLMPipeline, demo_model_path
from staticllm.errors import ConfigError, GenerationConfigError, ModelError, PromptError
from staticllm.pipelines.launch.genai_properties import from_genai, plain_properties

pytestmark = pytest.mark.usefixtures("shared_programs")

SMALL = {"MAX_PROMPT_LEN": 128, "MIN_RESPONSE_LEN": 64, "INFERENCE_PRECISION_HINT": "f32"}
QUESTION = [{"role": "user", "content": "What is an NPU?"}]


@pytest.fixture(scope="module")
def pipe():
    return StaticLLMPipeline(demo_model_path(), "CPU", SMALL)


def scheduler(**fields):
    config = genai.SchedulerConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("backend", ["SDPA", pytest.param("PA", marks=pytest.mark.slow)])
def test_arguments_of_genai_give_the_same_tokens(pipe, backend):
    other = StaticLLMPipeline(
        demo_model_path(),
        "cpu",
        {hints.inference_precision: ov.Type.f32, "MAX_PROMPT_LEN": 128, "MIN_RESPONSE_LEN": 64},
        scheduler_config=scheduler(max_num_seqs=3, num_kv_blocks=60),
        ATTENTION_BACKEND=backend,
        CACHE_DIR="",
        prompt_lookup=False,
    )
    assert (other.config.max_num_seqs, other.config.kv_slots, other.config.cache_dir) == (3, 1920, None)
    assert other.generate("Hello!", max_new_tokens=12).tokens == pipe.generate("Hello!", max_new_tokens=12).tokens


def test_a_scheduler_config_is_mapped():
    assert from_genai({"scheduler_config": scheduler(dynamic_split_fuse=False, enable_prefix_caching=True)}) == {
        "PREFIX_CACHING": True,
        "SCHEDULER": "prefill_first",
    }
    own = {"MAX_NUM_SEQS": 2, "MAX_PROMPT_LEN": 4096, "scheduler_config": scheduler(max_num_seqs=3, num_kv_blocks=1)}
    assert from_genai(own) == {"MAX_NUM_SEQS": 2, "MAX_PROMPT_LEN": 4096, "KV_SLOTS": 4224, "PREFIX_CACHING": False}
    with pytest.warns(UserWarning, match="max_num_batched_tokens") as caught:
        found = from_genai({"scheduler_config": scheduler(cache_size=2, max_num_batched_tokens=512)})
    assert len(caught) == 1
    assert found["KV_CACHE_GB"] == 2
    with pytest.raises(ConfigError, match="use_cache_eviction"):
        from_genai({"scheduler_config": scheduler(use_cache_eviction=True)})
    with pytest.raises(ConfigError, match="must be an"):
        from_genai({"scheduler_config": {}})


@pytest.mark.parametrize("name", ["llama", "bloom", pytest.param("demo", marks=pytest.mark.slow)])
def test_a_cache_size_is_converted_to_kv_slots(name, model_path):
    """The number of slots is the largest that fits, but at least one longest sequence."""
    options = {"MAX_PROMPT_LEN": 32, "MIN_RESPONSE_LEN": 16, "KV_CACHE_PRECISION": "f32"}
    with StaticLLMPipeline(model_path(name), KV_CACHE_GB=0.004, **options) as pipe:
        cache = pipe.engine.runner.cache
        bytes_per_slot = cache.arena.num_bytes / cache.arena.num_slots
        assert pipe.config.kv_slots == cache.num_slots == int(0.004e9 // bytes_per_slot) > 48
        assert pipe.generate(np.arange(10, 20), max_new_tokens=2, ignore_eos=True).tokens
    with StaticLLMPipeline(model_path(name), KV_CACHE_GB=1e-9, **options) as pipe:
        assert pipe.config.kv_slots == 48
    for bad in ({"KV_CACHE_GB": 0}, {"KV_CACHE_GB": "two"}, {"KV_CACHE_GB": 1, "KV_SLOTS": 64}):
        with pytest.raises(ConfigError, match="KV_CACHE_GB"):
            StaticLLMPipeline(model_path(name), **options, **bad)


def test_property_names_and_values_become_plain():
    plain = plain_properties(
        {
            hints.inference_precision: ov.Type.f32,
            hints.performance_mode: hints.PerformanceMode.LATENCY,
            props.log.level: props.log.Level.ERR,
            "PREFILL_CONFIG": {props.num_streams: 2},
        }
    )
    assert plain == {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "LOG_LEVEL": "LOG_ERROR",
        "PREFILL_CONFIG": {"NUM_STREAMS": 2},
    }
    assert {type(name) for name in (*plain, *plain["PREFILL_CONFIG"])} == {str}


@pytest.mark.parametrize("place", ["CACHE_DIR", pytest.param("BLOB_PATH", marks=pytest.mark.slow)])
def test_openvino_properties_work_with_blobs(pipe, tmp_path, place):
    asked = {
        hints.inference_precision: ov.Type.f32,
        hints.performance_mode: hints.PerformanceMode.LATENCY,
        props.cache_mode: props.CacheMode.OPTIMIZE_SIZE,
        place: tmp_path / "blobs",
        "MAX_PROMPT_LEN": 128,
        "MIN_RESPONSE_LEN": 64,
    }
    expected = pipe.generate("Hello!", max_new_tokens=12).tokens
    first = StaticLLMPipeline(
        demo_model_path(), "CPU", asked, **({"EXPORT_BLOB": "YES"} if place == "BLOB_PATH" else {})
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = StaticLLMPipeline(demo_model_path(), "CPU", asked)
    for made in (first, again):
        assert made.generate("Hello!", max_new_tokens=12).tokens == expected


def in_memory():
    folder = demo_model_path()

    def read(name):
        weights = np.frombuffer((folder / f"{name}.bin").read_bytes(), np.uint8)
        return (folder / f"{name}.xml").read_text(encoding="utf-8"), ov.Tensor(weights.copy())

    return *read("openvino_model"), genai.Tokenizer(*read("openvino_tokenizer"), *read("openvino_detokenizer"))


def test_a_model_in_memory_can_be_loaded(pipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, weights, tokenizer = in_memory()
    config = genai.GenerationConfig(max_new_tokens=9)
    whole = StaticLLMPipeline(model, weights, tokenizer, "CPU", config, **SMALL)
    assert whole.generate("Hello!").tokens == pipe.generate("Hello!", max_new_tokens=9).tokens
    assert not list(tmp_path.iterdir()), "nothing was written"
    named = StaticLLMPipeline(model, weights=weights, tokenizer=tokenizer, CACHE_DIR="cache", **SMALL)
    assert named.generate("Hello!", max_new_tokens=9).tokens == whole.generate("Hello!").tokens
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    for arguments, error in (
        ((model,), ModelError),
        ((model, weights), ConfigError),
        ((model[:-20], weights, tokenizer), ModelError),
        ((model, ov.Tensor(np.zeros(9, np.uint8)), tokenizer), ModelError),
    ):
        with pytest.raises(error) as raised:
            StaticLLMPipeline(*arguments)
        assert len(str(raised.value)) < 200


def test_devices_are_accepted_by_any_name():
    expected = StaticLLMPipeline(demo_model_path(), "CPU", SMALL).generate("Hello!", max_new_tokens=3)
    for name in ("AUTO", "AUTO:cpu", "cpu", "npu, Cpu", "HETERO:CPU", "hetero:GPU,CPU", "MULTI:CPU(2)", "BATCH:CPU"):
        assert StaticLLMPipeline(demo_model_path(), name, SMALL).generate("Hello!", max_new_tokens=3) == expected


def test_messages_are_accepted_in_every_form(pipe):
    expected = pipe.generate(genai.ChatHistory(QUESTION), max_new_tokens=12).tokens
    assert pipe.generate(QUESTION, max_new_tokens=12).tokens == expected
    assert pipe.submit(QUESTION, max_new_tokens=12).result().tokens == expected
    with pytest.raises(PromptError, match="it needs a 'role'"):
        pipe.generate([{"content": "x"}])
    assert pipe.generate([{"role": "user", "content": ""}], max_new_tokens=2).tokens, "as in GenAI"
    with pytest.raises(GenerationConfigError, match="apply_chat_template=False"):
        pipe.generate(QUESTION, apply_chat_template=False)


def test_a_chat_cannot_mix_text_and_token_ids(pipe):
    ids = np.array([[5, 6, 7]])
    pipe.start_chat()
    pipe.generate("Hello!", max_new_tokens=3)
    with pytest.raises(GenerationConfigError, match="goes on in text"):
        pipe.generate(ids)
    pipe.start_chat()
    pipe.generate(ids, max_new_tokens=3)
    with pytest.raises(GenerationConfigError, match="goes on in token ids"):
        pipe.generate("Hello!")
    with pytest.raises(GenerationConfigError, match="one prompt and one answer per turn"):
        pipe.generate(np.array([[5], [6]]))
    pipe.finish_chat()
    assert pipe.generate("Hello!", max_new_tokens=3)


def test_results_are_of_genais_classes(pipe):
    decoded, encoded = pipe.generate(["Hello!"], max_new_tokens=3), pipe.generate(np.array([[5]]), max_new_tokens=3)
    assert isinstance(decoded, genai.DecodedResults)
    assert isinstance(decoded, DecodedResults)
    assert isinstance(encoded, genai.EncodedResults)
    assert not isinstance(encoded, genai.DecodedResults)
    assert decoded.parsed == encoded.parsed == []
    assert isinstance(decoded.parsed, list)
    for result in (decoded, encoded):
        assert copy.copy(result) == result
        assert pickle.loads(pickle.dumps(result)).tokens == result.tokens


def test_metrics_unpack_and_separate_text_from_other_times(pipe):
    metrics = pipe.generate(["Hello!"], max_new_tokens=3).perf_metrics
    mean, std = metrics.get_ttft()
    assert (mean, std) == metrics.get_ttft()
    assert std == 0
    for duration in (metrics.get_detokenization_duration(), metrics.get_chat_template_duration()):
        assert 0 < duration.mean < metrics.get_generate_duration().mean
    plain = pipe.generate(["Hello!"], max_new_tokens=3, apply_chat_template=False).perf_metrics
    assert plain.raw_metrics.chat_template_durations == []
    assert plain.get_chat_template_duration() == (-1, -1)
    assert pipe.generate(np.array([[5]]), max_new_tokens=3).perf_metrics.get_detokenization_duration().mean == -1


def test_inert_options_of_beams_and_assistants_are_accepted(pipe):
    inert = {"num_beam_groups": 2, "diversity_penalty": 1.0, "length_penalty": 2.0}
    expected = pipe.generate("Hello!", max_new_tokens=6).tokens
    assert pipe.generate("Hello!", max_new_tokens=6, num_assistant_tokens=0, min_p=1.0, **inert).tokens == expected

"""Compares greedy tokens with those of the original stateful IR, in f32 with f32 slots."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from statistics import median

import numpy as np
import pytest
from support.helpers import EXACT, tokens_of

from staticllm import StaticLLMPipeline
from tests.support.inside import launched_of

pytestmark = pytest.mark.usefixtures("shared_programs")

SLOW = pytest.mark.slow
LENGTHS, QUICK_LENGTHS = (1, 5, 40, 300, 900), (1, 40, 300)
NUM_NEW, QUICK_NUM_NEW = 64, 24


def pipeline(path, mode, **properties):
    return StaticLLMPipeline(path, "CPU", PROGRAMS=mode, **EXACT, **properties)


@pytest.fixture
def references(model_path, original):
    return lambda name: original(model_path(name))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(pytest.param(name, "separate", marks=SLOW) for name in ("llama", "qwen3", "bloom", "demo")),
        *((name, mode) for mode in ("blocks", "shared") for name in ("llama", "qwen3", "bloom", "demo")),
        *(pytest.param(name, mode, marks=SLOW) for mode in ("blocks", "shared") for name in ("qwen2", "mistral")),
    ],
)
def test_greedy_tokens_equal_those_of_the_stateful_model(name, mode, model_path, references, prompt_of, in_full):
    pipe = pipeline(model_path(name), mode)
    num_new = NUM_NEW if in_full else QUICK_NUM_NEW
    for length in LENGTHS if in_full else QUICK_LENGTHS:
        prompt = prompt_of(length)
        result = pipe.generate(np.array([prompt]), max_new_tokens=num_new, ignore_eos=True)
        assert result.tokens[0] == references(name).greedy(prompt, num_new), f"prompt of {length} tokens"
        assert result.finish_reasons == ["length"]


@pytest.mark.parametrize(
    "mode", ["separate", "blocks", "shared", *(pytest.param(mode, marks=SLOW) for mode in ("phases", "few_rows"))]
)
def test_small_chunks_and_kv_lengths_change_no_token(mode, model_path, references, prompt_of):
    """Chunks have 16 tokens, and the generation crosses two KV lengths."""
    pipe = pipeline(
        model_path("qwen3"),
        mode,
        MAX_PROMPT_LEN=100,
        MIN_RESPONSE_LEN=28,
        PREFILL_ROWS=[16],
        GENERATE_KV_LENS=[48, 64, 128],
    )
    prompt = prompt_of(40)
    assert tokens_of(pipe, prompt, 60) == references("qwen3").greedy(prompt, 60)


@pytest.mark.parametrize("mode", [pytest.param("separate", marks=SLOW), "blocks", "shared"])
def test_windows_change_no_token(mode, references, model_path, prompt_of):
    pipe, prompt = pipeline(model_path("gemma2"), mode, MAX_PROMPT_LEN=256), prompt_of(100)
    assert tokens_of(pipe, prompt, 48) == references("gemma2").greedy(prompt, 48)


@SLOW
def test_f32_is_exact_for_short_prompts_on_int8_weights(references, model_path, prompt_of):
    """The embedded model is int8. With f32, the CPU must not quantize activations, whatever ran before."""
    pipe = pipeline(model_path("demo"), "shared")
    for seed in range(30):
        prompt = prompt_of(2 + seed % 27, seed=seed // 3)
        assert tokens_of(pipe, prompt, 32) == references("demo").greedy(prompt, 32), f"prompt {seed}"


def test_a_reused_prefix_changes_no_token(model_path, references, prompt_of):
    pipe = pipeline(model_path("llama"), "shared", MAX_PROMPT_LEN=256)
    base = prompt_of(200)
    for prompt in (base, [*base, *prompt_of(30, seed=1)], [*base[:120], *prompt_of(9, seed=2)], base[:50]):
        result = pipe.generate(np.array(prompt), max_new_tokens=24, ignore_eos=True)
        assert result.tokens[0] == references("llama").greedy(prompt, 24)
        if prompt is not base:
            assert result.perf_metrics.get_num_cached_tokens() >= min(len(prompt) - 1, 120)


def test_f16_slots_give_the_tokens_of_the_original(model_path, references, prompt_of):
    properties = {**EXACT, "KV_CACHE_PRECISION": "f16", "MAX_PROMPT_LEN": 128}
    pipe = StaticLLMPipeline(model_path("demo"), "CPU", **properties)
    prompt = pipe.get_tokenizer().encode("Tell me a story about a fox.").input_ids.data[0].tolist()
    assert tokens_of(pipe, prompt, 32) == references("demo").greedy(prompt, 32)


def test_separate_programs_have_only_static_shapes(model_path):
    """The ports of the compiled models are checked."""
    pipe = pipeline(model_path("llama"), "separate", MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=32, MAX_NUM_SEQS=2)
    programs = list(pipe.engine.runner.programs.values())
    compiled = {id(program.compiled): program.compiled for program in programs}
    assert len(compiled) == len(programs)
    for program in programs:
        for port in (*program.compiled.inputs, *program.compiled.outputs):
            assert port.partial_shape.is_static, (program.variant, port)
    shared = pipeline(model_path("llama"), "shared", MAX_PROMPT_LEN=32, MIN_RESPONSE_LEN=16)
    assert len({id(program.compiled) for program in shared.engine.runner.programs.values()}) == 1


MEASURE_MEMORY = """
import numpy as np, psutil
from staticllm import StaticLLMPipeline, demo_model_path

pipe = StaticLLMPipeline(demo_model_path(), "CPU", HOST_KV_SLOTS=0, MAX_PROMPT_LEN=1024)
arena = pipe.engine.runner.cache.arena
for seed in range(24):
    prompt = np.random.default_rng(seed).integers(8, 1000, 1000)
    pipe.generate(prompt, max_new_tokens=152, ignore_eos=True)
    print(psutil.Process().memory_info().rss, arena.num_bytes, arena.addresses)
"""


@SLOW
def test_slot_memory_is_allocated_once(model_path):
    """The test runs in a child process, where nothing else allocates memory."""
    done = subprocess.run([sys.executable, "-c", MEASURE_MEMORY], capture_output=True, text=True, check=True)
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert len({(num_bytes, addresses) for _, num_bytes, addresses in lines}) == 1
    shape = launched_of(StaticLLMPipeline(model_path("demo"))).loaded.programs.shape
    assert shape.slot_bytes * 4 * 1152 <= int(lines[0][1]) < 2 * shape.slot_bytes * 4 * 1152, "some pages are spare"
    sizes = [int(num_bytes) for num_bytes, *_ in lines]
    growth = [after - before for before, after in pairwise(sizes)]  # a variant that runs for the first time grows, too
    assert median(growth[-6:]) < int(lines[0][1]) / 32, f"the process grows with every answer: {growth}"


def test_generation_ends_at_max_seq_len(model_path, prompt_of):
    pipe = pipeline(model_path("llama"), "shared", MAX_PROMPT_LEN=32, MIN_RESPONSE_LEN=16)
    result = pipe.generate(np.array(prompt_of(32)), ignore_eos=True)
    assert len(result.tokens[0]) == 16, "NPUW gives as many"
    assert result.finish_reasons == ["length"]
    assert len(pipe.generate(np.array(prompt_of(8)), ignore_eos=True).tokens[0]) == 40

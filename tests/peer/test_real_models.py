"""Tests published models with real weights: staticllm gives the tokens of GenAI in f32, in each of its ways to run.

Without their files (`python scripts/real_models.py NAME`) the tests are skipped. GenAI runs the model directory that was made of
the GGUF file: its own reader of these files rounds their weights.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest

from staticllm import StaticLLMPipeline
from staticllm.config import StaticLLMConfig
from staticllm.model_files.converted import converted
from staticllm.pipelines.diagnostics import divergence
from staticllm.pipelines.diagnostics.divergence import MOST_DIVERGENCE, measure_divergence

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from real_models import MODELS, folder

F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
PEER = {**F32, "ATTENTION_BACKEND": "SDPA"}
"""Its paged attention takes keys and values of other shapes than these."""
SIZES = {"MAX_PROMPT_LEN": 1024, "MIN_RESPONSE_LEN": 128}
NUM_TOKENS = 24
TOPICS = (
    "the capital of France",
    "how a rainbow forms",
    "prime numbers",
    "a poem about rain",
    "sorting a list in Python",
)
QUESTIONS = (
    "What is {}?", "Explain {} to a child.", "Write two sentences about {}.", "Give me three facts about {}.",
    "Why would anybody care about {}?", "Translate into French: I know {}.", "List five words that go with {}.",
    "Continue: Yesterday I read about {}, and",
)  # fmt: skip
PROMPTS = [question.format(topic) for topic in TOPICS for question in QUESTIONS]

pytestmark = pytest.mark.slow


def file_of(name):
    path = folder() / MODELS[name].file
    if not path.is_file():
        pytest.skip(f"no {path}: python scripts/real_models.py {name}")
    return path


@pytest.fixture(scope="module")
def smollm2():
    return file_of("smollm2")


@pytest.fixture(scope="module")
def peer(smollm2):
    return genai.LLMPipeline(str(converted(smollm2)), "CPU", **PEER)


@pytest.fixture(scope="module")
def expected(peer):
    """GenAI's tokens after each prompt."""
    return {prompt: tokens_of(peer, prompt) for prompt in PROMPTS}


def tokens_of(pipe, prompt, **options):
    text = pipe.get_tokenizer().apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    ids = pipe.get_tokenizer().encode(text, add_special_tokens=False)
    config = genai.GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, **options)
    config.set_eos_token_id(2)
    return list(pipe.generate(ids, config).tokens[0])


@pytest.fixture(scope="module")
def pipe(smollm2):
    with StaticLLMPipeline(smollm2, "CPU", **SIZES, **F32) as found:
        yield found


def test_forty_prompts_get_the_tokens_of_genai(pipe, expected):
    assert {prompt: tokens_of(pipe, prompt) for prompt in PROMPTS} == expected


def test_it_knows_the_capital_of_france(pipe):
    assert "Paris" in str(pipe.generate("What is the capital of France?", max_new_tokens=20))


def test_eight_clients_get_their_own_tokens(pipe, expected):
    """Every other prompt, so that each client has two or three, which it asks beside those of the others."""
    found, prompts = {}, PROMPTS[::2]

    def ask(part):
        found.update({prompt: tokens_of(pipe, prompt) for prompt in part})

    threads = [threading.Thread(target=ask, args=(prompts[place::8],)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {prompt: expected[prompt] for prompt in prompts}


@pytest.mark.parametrize(
    "properties",
    [
        {"PROGRAMS": "blocks", "MAX_NUM_SEQS": 4},
        {"PROGRAMS": "shared", "PREFILL_ROWS": (16,)},
        {"PROGRAMS": "separate", "MAX_NUM_SEQS": 2},
        {"prompt_lookup": True},
    ],
)
def test_every_way_to_run_gives_the_same_tokens(properties, smollm2, expected):
    options = {"num_assistant_tokens": 3, "max_ngram_size": 3} if properties.get("prompt_lookup") else {}
    with StaticLLMPipeline(smollm2, "CPU", **{**SIZES, "MAX_PROMPT_LEN": 128, **properties}, **F32) as pipe:
        for prompt in PROMPTS[::5]:
            assert tokens_of(pipe, prompt, **options) == expected[prompt]


def test_a_blob_set_gives_the_same_tokens(smollm2, expected, tmp_path):
    sizes = {**SIZES, "MAX_PROMPT_LEN": 128, "BLOB_PATH": tmp_path / "set", **F32}
    with StaticLLMPipeline(smollm2, "CPU", EXPORT_BLOB=True, **sizes):
        pass
    with StaticLLMPipeline(smollm2, "CPU", **sizes) as pipe:
        for prompt in PROMPTS[::10]:
            assert tokens_of(pipe, prompt) == expected[prompt]


def test_a_grammar_gives_the_answer_of_genai(pipe, peer):
    config = genai.GenerationConfig(max_new_tokens=8, do_sample=False)
    config.set_eos_token_id(2)
    config.structured_output_config = genai.StructuredOutputConfig(regex=r"(Paris|London|Rome)")
    for prompt in ("What is the capital of France?", "Which city has the Colosseum?", "Where is Big Ben?"):
        assert str(pipe.generate(prompt, config)) == str(peer.generate(prompt, config))


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_any_chunks_of_a_long_text_give_the_same_next_token(name):
    """Longer than the sliding window of the second model."""
    path = file_of(name)
    text = (Path(__file__).resolve().parents[2] / "docs" / "contract.md").read_text("utf-8")
    found = []
    for properties in ({"PREFILL_ROWS": (1024,)}, {"PREFILL_ROWS": (64,)}):
        with StaticLLMPipeline(path, "CPU", **SIZES, **properties, **F32) as pipe:
            ids = np.array(pipe.get_tokenizer().encode(text).input_ids.data[0, :900])
            found.append(list(pipe.generate(ids, max_new_tokens=8, ignore_eos=True).tokens[0]))
    reference = genai.LLMPipeline(str(converted(path)), "CPU", **PEER)
    tokens = genai.TokenizedInputs(ov.Tensor(ids[None]), ov.Tensor(np.ones((1, len(ids)), np.int64)))
    config = genai.GenerationConfig(max_new_tokens=8, ignore_eos=True, do_sample=False)
    assert found == [list(reference.generate(tokens, config).tokens[0])] * 2


@pytest.fixture
def news(monkeypatch):
    """A text that the model has not written; two passages of it are compared."""
    monkeypatch.setattr(divergence, "MOST_PASSAGES", 2)
    return file_of("news").read_text("utf-8")[:20_000]


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_keys_and_values_of_8_bits_stay_within_the_bound(name, news):
    """The first setting that is measured is f32, so that only the rounding of keys and values is seen."""
    config = StaticLLMConfig(kv_cache_precision="u8")
    found = next(measure_divergence(converted(file_of(name)), "CPU", config, text=news))
    assert found.settings == "f32, no quantization"
    assert 1e-7 < found.mean <= MOST_DIVERGENCE
    assert abs(np.log(found.perplexity / found.exact_perplexity)) <= MOST_DIVERGENCE


def test_what_the_calibration_chooses_stays_within_the_bound(smollm2, news):
    found = list(measure_divergence(converted(smollm2), "CPU", StaticLLMConfig(), text=news))
    chosen = [each for each in found if each.chosen_for]
    assert {part for each in chosen for part in each.chosen_for} >= {"prefill", "generate"}
    for each in chosen:
        assert each.is_within, each
        assert each.percentile_99 < 10 * MOST_DIVERGENCE, each
    assert found[0].exact_perplexity < 100, "the tokens are those of the text"

"""Compares every field of a model's ``generation_config.json``, alone and with odd values, with GenAI: both answer, or refuse."""

from __future__ import annotations

import json

import openvino_genai as genai
import pytest

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.pipelines.generation.options.resolve import NAMES

pytestmark = pytest.mark.usefixtures("shared_programs")

OF_TRANSFORMERS = (
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "cache_config", "cache_implementation", "chat_format", "compile_config",
    "constraints", "decoder_start_token_id", "disable_compile", "diversity_penalty", "do_sample", "dola_layers",
    "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "eos_token_id", "epsilon_cutoff",
    "eta_cutoff", "exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id", "forced_decoder_ids",
    "forced_eos_token_id", "guidance_scale", "is_assistant", "length_penalty", "low_memory", "max_length",
    "max_matching_ngram_size", "max_new_tokens", "max_time", "max_window_size", "min_length", "min_new_tokens", "min_p",
    "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_logits", "output_scores", "pad_token_id",
    "penalty_alpha", "prefill_chunk_size", "prompt_lookup_num_tokens", "remove_invalid_values", "renormalize_logits",
    "repetition_penalty", "return_dict_in_generate", "return_legacy_cache", "sequence_bias", "stop_strings",
    "suppress_tokens", "target_lookbehind", "temperature", "token_healing", "top_h", "top_k", "top_p", "transformers_version",
    "typical_p", "use_cache", "watermarking_config", "_from_model_config", "trust_remote_code",
)  # fmt: skip
FIELDS = sorted({*OF_TRANSFORMERS, *NAMES})
VALUES = (None, True, 0, 1, -1, 5, 0.5, 2.0, 1e9, "", "EARLY", [], [5], ["e"], [[5]], {}, {"5": 1.0})
FEW_VALUES = (None, True, -1, 5, 0.5, "", [5], {})
"""For fields that ours ignores: one value of each type shows whether GenAI knows the field."""
METHODS = ({}, {"do_sample": True}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2})
DIFFERENT = ("max_ngram_size",)
"""Here, the field turns on prompt lookup for any request; GenAI refuses it in a pipeline without ``prompt_lookup``."""
OWN = {**json.loads((demo_model_path() / "generation_config.json").read_text()), "max_new_tokens": 4}


@pytest.fixture(scope="module")
def ours():
    with StaticLLMPipeline(demo_model_path(), "CPU", MAX_PROMPT_LEN=128, **EXACT) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def theirs():
    return genai.LLMPipeline(demo_model_path(), "CPU", ATTENTION_BACKEND="SDPA", **EXACT)


def is_skipped(field, value):
    """GenAI takes what the number needs in memory, or does not end."""
    is_many = value == 1e9 and field in ("num_beams", "num_return_sequences", "logprobs")
    return is_many or (field == "logprobs" and value == -1) or field == "echo" or field in DIFFERENT


def answer(pipe, path):
    """Return the texts of an answer with this file's options, or None if they are refused."""
    try:
        pipe.set_generation_config(genai.GenerationConfig(path))
        return pipe.generate(["Hello"]).texts
    except (RuntimeError, TypeError, ValueError):
        return None


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_alone_is_answered_or_refused_alike(ours, theirs, field, tmp_path):
    path = tmp_path / "generation_config.json"
    for value in VALUES if field in NAMES else FEW_VALUES:
        if not is_skipped(field, value):
            path.write_text(json.dumps({**OWN, field: value}))
            assert answer(ours, path) == answer(theirs, path) or field == "do_sample", value


# GenAI divides by zero if there are fewer beams than groups.
FEW = ["num_assistant_tokens", "branching_factor", "temperature", "top_p", "top_k", "min_p", "max_length", "length_penalty",
       "diversity_penalty", "repetition_penalty", "min_new_tokens", "no_repeat_ngram_size"]  # fmt: skip


@pytest.mark.parametrize("method", METHODS[1:], ids=["sampling", "beams", "several"])
@pytest.mark.parametrize("field", FEW)
def test_a_field_beside_a_decoding_method_is_answered_or_refused_alike(ours, theirs, field, method, tmp_path):
    path = tmp_path / "generation_config.json"
    for value in (0, 1, -1, 5, 0.5, 2.0, 1e9):
        path.write_text(json.dumps({**OWN, **method, field: value}))
        mine = answer(ours, path)
        if (
            mine is None or field != "num_assistant_tokens"
        ):  # refused by GenAI beside several answers, and without effect here
            assert (mine is None) == (answer(theirs, path) is None), value

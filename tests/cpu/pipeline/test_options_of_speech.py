"""Tests that each option of a transcription changes what is written, or is refused in one line: none is taken and ignored."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import numpy as np
import openvino_genai as genai
import pytest
from support.helpers import one_line
from support.models.whisper_directory import sound, write_whisper

from staticllm import StaticWhisperPipeline
from staticllm.errors import ConfigError, GenerationConfigError
from staticllm.pipelines import whisper_pipeline
from staticllm.pipelines.generation.options.extra import EXTRA_NAMES
from staticllm.pipelines.generation.options.requested_grammar import KEYWORDS
from staticllm.pipelines.generation.options.resolve import NAMES
from staticllm.pipelines.speech.voice import FRAME
from staticllm.pipelines.speech.whisper_config import WHISPER_NAMES

F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "word_timestamps": True}
SAMPLES = sound(3.3, 5)
SECONDS = 60
ARGUMENTS = frozenset(inspect.signature(StaticWhisperPipeline.generate).parameters) - {
    "self", "raw_speech_input", "generation_config", "kwargs", "streamer", "priority",
}  # fmt: skip
"""The arguments of a call that are options; a stream and a priority do not change what is written."""
ALL_NAMES = frozenset((*NAMES, *EXTRA_NAMES, *KEYWORDS, *WHISPER_NAMES, *ARGUMENTS))


@dataclass(frozen=True)
class Known:
    """What is written without options: its tokens, and the end of a text."""

    tokens: list[int]
    text: str
    end: int


@dataclass(frozen=True)
class Changes:
    """A value with which more is written, less, or something else, beside options without which it has no effect.

    A function is called with what is ``Known``.
    """

    value: object
    beside: dict[str, object] = field(default_factory=dict)


DRAWN = {"do_sample": True, "rng_seed": 3}
BEAMS = {"num_beams": 4}
GROUPS = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}
REPEATED = {"dry_multiplier": 5.0, "dry_base": 2.0, "dry_allowed_length": 1, "logit_bias": {40: 9.0, 41: 9.0}}


def last_is_best(ids, scores):
    return scores[..., ::-1].copy()


def ends_early(known):
    return {known.end: 8.0}


def fifth(known):
    return known.tokens[4]


def a_word(known):
    return known.text.split(" ")[5]


CASES = {
    # of text generation as well
    "do_sample": Changes(True, {"rng_seed": 3}),
    "rng_seed": Changes(4, DRAWN),
    "temperature": Changes(0.2, DRAWN),
    "top_k": Changes(2, DRAWN),
    "top_p": Changes(0.1, DRAWN),
    "min_p": Changes(0.5, DRAWN),
    "typical_p": Changes(0.1, DRAWN),
    "xtc_probability": Changes(1.0, {**DRAWN, "xtc_threshold": 0.001}),
    "xtc_threshold": Changes(0.4, {**DRAWN, "xtc_probability": 1.0}),
    "mirostat": Changes(2, {**DRAWN, "mirostat_tau": 0.5}),
    "mirostat_tau": Changes(0.5, {**DRAWN, "mirostat": 2}),
    "mirostat_eta": Changes(1.0, {**DRAWN, "mirostat": 2, "mirostat_tau": 2.0}),
    "dry_multiplier": Changes(5.0, {"dry_allowed_length": 1, "logit_bias": {40: 9.0, 41: 9.0}}),
    "dry_base": Changes(4.0, {**REPEATED, "dry_multiplier": 0.1}),
    "dry_allowed_length": Changes(8, REPEATED),
    "dry_penalty_last_n": Changes(1, REPEATED),
    "dry_sequence_breakers": Changes([" "], REPEATED),
    "repetition_penalty": Changes(50.0),
    "presence_penalty": Changes(2.0, {"logit_bias": {40: 9.0, 41: 8.5}}),
    "frequency_penalty": Changes(2.0, {"logit_bias": {40: 9.0, 41: 8.5}}),
    "no_repeat_ngram_size": Changes(1, {"logit_bias": {40: 9.0}}),
    "logit_bias": Changes({40: 50.0}),
    "bad_words_ids": Changes(lambda known: [[fifth(known)]]),
    "bad_words": Changes(lambda known: [a_word(known)]),
    "logits_processor": Changes(last_is_best),
    "max_new_tokens": Changes(3),
    "max_length": Changes(9),
    "min_new_tokens": Changes(12, {"logit_bias": ends_early}),
    "eos_token_id": Changes(fifth),
    "ignore_eos": Changes(True, {"logit_bias": ends_early}),
    "stop_token_ids": Changes(lambda known: {fifth(known)}),
    "stop_strings": Changes(lambda known: {a_word(known)}),
    "include_stop_str_in_output": Changes(True, {"stop_strings": lambda known: {a_word(known)}}),
    "num_beams": Changes(4),
    "num_beam_groups": Changes(4, GROUPS),
    "diversity_penalty": Changes(
        50.0, {**GROUPS, "diversity_penalty": 0.01, "length_penalty": -1.0, "eos_token_id": fifth}
    ),
    "length_penalty": Changes(-50.0, {**BEAMS, "eos_token_id": fifth}),
    "stop_criteria": Changes(genai.StopCriteria.NEVER, {**BEAMS, "eos_token_id": fifth, "length_penalty": 5.0}),
    # of speech alone
    "decoder_start_token_id": Changes(7),
    "pad_token_id": Changes(fifth, {"eos_token_id": -1}),
    "translate_token_id": Changes(7, {"task": "translate"}),
    "transcribe_token_id": Changes(7),
    "prev_sot_token_id": Changes(7, {"hotwords": "fox"}),
    "no_timestamps_token_id": Changes(40, {"return_timestamps": False}),
    "max_initial_timestamp_index": Changes(0),
    "is_multilingual": Changes(False),
    "language": Changes("de"),
    "lang_to_id": Changes({"<|en|>": 7}),
    "task": Changes("translate"),
    "return_timestamps": Changes(True),
    "word_timestamps": Changes(True),
    "initial_prompt": Changes("Once upon a time"),
    "hotwords": Changes("fox"),
    "begin_suppress_tokens": Changes(lambda known: list(range(known.end + 8, known.end + 12))),
    "suppress_tokens": Changes(lambda known: [fifth(known)]),
    "temperatures": Changes((0.9,)),
    "compression_ratio_threshold": Changes(1.2, {"temperatures": (0.0, 0.9)}),
    "logprob_threshold": Changes(-1e6, {"no_speech_threshold": 0.0}),
    "no_speech_threshold": Changes(0.0),
    "parallel_windows": Changes(2),
}
REFUSED = {
    "adapters": genai.AdapterConfig(), "apply_chat_template": True, "assistant_confidence_threshold": 0.5,
    "branching_factor": 3, "echo": True, "logprobs": 1, "max_ngram_size": 3, "num_assistant_tokens": 3,
    "num_return_sequences": 2, "parsers": [genai.ReasoningParser()] if hasattr(genai, "ReasoningParser") else [1],
    "pruning_ratio": 50, "relevance_weight": 0.1, "return_omni_outputs": True, "tree_depth": 3,
    "structured_output_config": genai.StructuredOutputConfig(regex="a+"), "alignment_heads": [(0, 1)],
    "finish_grammar": 0, "tools": [{"name": "a"}], "tool_choice": "required", "parse_tools": True,
    "parallel_tool_calls": False,
    "extra_context": {"a": 1}, "best_of": 2, "suffix": "a", "top_logprobs": 2,
    "json_schema": {"type": "object"}, "regex": "a+", "choice": ["a"],
    "grammar": "root ::= \"a\"",
}  # fmt: skip


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    with StaticWhisperPipeline(write_whisper(tmp_path_factory.mktemp("whisper")), **F32) as found:
        yield found


@pytest.fixture(scope="module")
def known(pipe):
    found = pipe.generate(SAMPLES)
    tokens = [token for word in found.words for token in word.token_ids]
    return Known(tokens, str(found), pipe.get_generation_config().eos_token_id)


def detect(samples):
    """Return probabilities of speech that cut a recording into windows of different lengths."""
    return np.random.default_rng(5).uniform(0.6, 1, -(-len(samples) // FRAME)).astype(np.float32)


def written(pipe, options):
    """Return all that is written of the recording, and how its windows were heard."""
    windows = []
    options = {"word_timestamps": False, **options}
    found = pipe.submit(SAMPLES, on_window=windows.append, **options).result(SECONDS)
    return str(found), found.language, str(found.chunks), str(found.words), [window.temperature for window in windows]


def given(value, known):
    return value(known) if callable(value) and value is not last_is_best else value


def test_each_option_is_tried_here():
    assert not CASES.keys() & REFUSED.keys()
    assert {*CASES, *REFUSED} == ALL_NAMES


@pytest.mark.parametrize("name", CASES)
def test_an_option_changes_what_is_written(pipe, known, name, monkeypatch):
    monkeypatch.setattr(whisper_pipeline, "voice_detector", lambda: detect)
    case = CASES[name]
    beside = {other: given(value, known) for other, value in case.beside.items()}
    assert written(pipe, {**beside, name: given(case.value, known)}) != written(pipe, beside)


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_speech_does_not_have_is_refused(pipe, known, name):
    with pytest.raises(GenerationConfigError, match=name) as caught:
        written(pipe, {"word_timestamps": name == "alignment_heads", name: REFUSED[name]})
    assert one_line(caught)
    assert str(pipe.generate(SAMPLES)) == known.text


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"MAX_WINDOWS": 2, "max_windows": 3}, "MAX_WINDOWS and max_windows are the same: leave one of them out"),
        ({"config": {"word_timestamps": True, "WORD_TIMESTAMPS": False}}, "are the same: leave one of them out"),
        ({"temperatures": (0.0,), "Temperatures": (1.0,)}, "are the same: leave one of them out"),
        ({"MAX_PROMPT_LEN": 64}, "MAX_PROMPT_LEN has no meaning for speech: leave it out"),
        ({"config": {"MIN_RESPONSE_LEN": 64}}, "MIN_RESPONSE_LEN has no meaning for speech: leave it out"),
        ({"on_progress": 5}, "on_progress=5: must be a function of one ProgressEvent, or None"),
        ({"on_progress": ""}, "on_progress='': must be a function of one ProgressEvent, or None"),
    ],
)
def test_an_argument_of_a_load_that_would_be_ignored_is_refused(directory, given, said):
    with pytest.raises(ConfigError) as caught:
        StaticWhisperPipeline(directory, **given)
    assert said in one_line(caught)


def test_a_property_by_its_name_wins_over_the_config(directory):
    """As for all other properties."""
    given = {"MAX_WINDOWS": 3, "TEMPERATURES": (0.5,)}
    with StaticWhisperPipeline(directory, config=given, MAX_WINDOWS=2, temperatures=(0.0, 0.4)) as pipe:
        assert pipe.num_windows == 2
        assert pipe.get_generation_config().temperatures == (0.0, 0.4)
        assert given == {"MAX_WINDOWS": 3, "TEMPERATURES": (0.5,)}


@pytest.mark.parametrize("name", ["on_text", "on_window"])
@pytest.mark.parametrize("value", [5, 0, "", [], object()])
def test_what_receives_a_transcription_is_checked_before_it_begins(pipe, name, value):
    with pytest.raises(GenerationConfigError, match=f"^{name}=.*: must be a function of a ") as caught:
        pipe.submit(SAMPLES, **{name: value})
    assert one_line(caught)

"""Tests ``WhisperGenerationConfig`` and how a call's options are checked, beside GenAI's own class."""

from __future__ import annotations

import json

import openvino_genai as genai
import pytest

from staticllm.errors import GenerationConfigError, ModelError
from staticllm.pipelines.speech.whisper_config import (
    WHISPER_NAMES,
    FallBackParams,
    WhisperGenerationConfig,
    completed,
    copy_whisper_config,
    whisper_options,
)

LANGUAGES = {"<|en|>": 50259, "<|de|>": 50261, "<|ja|>": 50266}
FILE = {
    "decoder_start_token_id": 50258, "eos_token_id": 50257, "pad_token_id": 50257, "no_timestamps_token_id": 50363,
    "prev_sot_token_id": 50361, "max_length": 448, "max_initial_timestamp_index": 40, "is_multilingual": True,
    "lang_to_id": LANGUAGES, "task_to_id": {"transcribe": 50359, "translate": 50358}, "alignment_heads": [[1, 0], [2, 5]],
    "suppress_tokens": [1, 2, 7], "begin_suppress_tokens": [220, 50257], "logprob_threshold": -1.0,
}  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(FILE))
    return path


@pytest.fixture
def config(file):
    return WhisperGenerationConfig(file)


def english():
    return WhisperGenerationConfig(is_multilingual=False, eos_token_id=50256)


def test_every_field_of_genai_is_checked():
    shared = dir(genai.GenerationConfig)
    assert {name for name in dir(genai.WhisperGenerationConfig) if name not in shared} < set(WHISPER_NAMES)
    assert {name for name in WHISPER_NAMES if not hasattr(genai.WhisperGenerationConfig, name)} == {
        "temperatures", "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold",
    }  # fmt: skip


def test_a_file_is_read_as_genai_reads_it(file, config):
    theirs = genai.WhisperGenerationConfig(file)
    for name in WHISPER_NAMES:
        if hasattr(theirs, name):
            assert getattr(config, name) == getattr(theirs, name), name
    assert config.logprob_threshold == -1.0
    assert config.temperatures == ()
    assert isinstance(config, genai.WhisperGenerationConfig)


def test_options_of_a_call(config):
    options = whisper_options(config, {"language": "<|de|>", "task": "translate", "max_new_tokens": 5})
    assert (options.language, options.task, options.generation.max_new_tokens) == ("de", "translate", 5)
    assert options.tokens.languages == {"en": 50259, "de": 50261, "ja": 50266}
    assert (options.tokens.no_speech, options.tokens.timestamp_begin, options.tokens.eos) == (50362, 50364, 50257)
    assert options.suppress_tokens == (1, 2, 7)
    assert options.alignment_heads == ((1, 0), (2, 5))
    assert options.max_initial_timestamp_index == 40
    assert whisper_options(config, {}).generation.max_length == 448
    assert options.generation.stop_token_ids == {50257}
    assert config.language is None


def test_a_config_of_genai_has_no_thresholds(file):
    options = whisper_options(genai.WhisperGenerationConfig(file), {})
    assert options.fall_back == FallBackParams((0.0,))


def test_temperatures(config):
    given = {"temperature": [0, 0.2, 1.0], "compression_ratio_threshold": 2.4, "no_speech_threshold": 0.6}
    assert whisper_options(config, given).fall_back == FallBackParams((0.0, 0.2, 1.0), 2.4, -1.0, 0.6)
    assert whisper_options(config, {"do_sample": True, "temperature": 0.7}).fall_back.temperatures == (0.7,)


def test_update_changes_all_fields_or_none(config):
    config.update_generation_config(language="en", prev_sot_token_id=50000, temperatures=(0.0, 0.4), num_beams=2)
    assert (config.language, config.prev_sot_token_id, config.temperatures) == ("en", 50000, (0.0, 0.4))
    assert config.num_beams == 2
    with pytest.raises(GenerationConfigError):
        config.update_generation_config(language="ja", return_timestamps="always")
    assert config.language == "en"


def test_a_copy_has_every_field_and_is_apart(config):
    config.update_generation_config(hotwords="Polychrome", temperatures=(0.0, 0.4), max_new_tokens=9)
    copied = copy_whisper_config(config)
    assert all(getattr(copied, name) == getattr(config, name) for name in (*WHISPER_NAMES, "max_new_tokens"))
    copied.hotwords = "other"
    assert config.hotwords == "Polychrome"


def test_a_call_gets_stop_tokens_and_languages_of_the_model(config):
    given = completed(genai.WhisperGenerationConfig(language="de"), config)
    assert given.eos_token_id == 50257
    assert whisper_options(given, {}).language == "de"


REFUSED = [
    ({"language": "xx"}, "language='xx' is not one of the model's: de, en, ja"),
    ({"task": "summarise"}, "task='summarise': must be 'transcribe' or 'translate'"),
    ({"task": 3}, "task=3: must be a str or None"),
    ({"word_timestamps": True, "alignment_heads": []}, "without alignment_heads"),
    ({"alignment_heads": [(1,)]}, "must be a list of pairs"),
    ({"alignment_heads": [(1, -1)]}, "a head of alignment_heads=-1"),
    ({"suppress_tokens": [-1]}, "a token of suppress_tokens=-1"),
    ({"suppress_tokens": "abc"}, "must be a list of token ids"),
    ({"max_initial_timestamp_index": 1501}, "max_initial_timestamp_index=1501"),
    ({"return_timestamps": "yes"}, "must be True or False"),
    ({"lang_to_id": {}}, "is_multilingual=True without lang_to_id"),
    ({"lang_to_id": {"<|en|>": "x"}}, "lang_to_id['<|en|>']='x'"),
    ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
    ({"num_assistant_tokens": 3}, "without drafts"),
    ({"tools": []}, "tools is an option of text generation"),
    ({"json_schema": "{}"}, "json_schema is an option of text generation"),
    ({"temperature": (0.0, "x")}, "must be at most 16 numbers"),
    ({"temperatures": tuple(range(17))}, "must be at most 16 numbers"),
    ({"temperatures": (float("nan"),)}, "must be at most 16 numbers"),
    ({"temperature": [0.0], "temperatures": (0.0,)}, "leave one of them out"),
    ({"no_speech_threshold": 1.5}, "no_speech_threshold=1.5"),
    ({"logprob_threshold": "low"}, "logprob_threshold='low'"),
    ({"initial_prompt": "x" * 70000}, "initial_prompt has 70000 characters"),
    ({"languag": "en"}, "unknown option 'languag': did you mean 'language'?"),
    ({"num_beams": 0.5}, "num_beams=0.5"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_impossible_options_get_one_line(config, given, message):
    with pytest.raises(GenerationConfigError) as error:
        whisper_options(config, given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [{"language": "en"}, {"task": "translate"}, {"task": "transcribe"}])
def test_an_english_only_model_takes_neither_language_nor_task(given):
    with pytest.raises(GenerationConfigError, match="knows English only"):
        whisper_options(english(), given)
    with pytest.raises(RuntimeError):
        genai.WhisperGenerationConfig(is_multilingual=False, **given).validate()


def test_validate_checks_what_attributes_were_set_to(config):
    config.validate()
    config.language = "xx"
    with pytest.raises(GenerationConfigError, match="is not one of the model's"):
        config.validate()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"suppress_tokens": ["a"]}', "a token of suppress_tokens='a'"),
        ('{"max_length": "long"}', "max_length='long'"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, text, message):
    path = tmp_path / "generation_config.json"
    path.write_text(text)
    with pytest.raises((ModelError, GenerationConfigError)) as error:
        WhisperGenerationConfig(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(ModelError):
        WhisperGenerationConfig(tmp_path / "missing.json")


def test_a_damaged_threshold_of_a_file_is_refused(tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text('{"no_speech_threshold": 7}')
    with pytest.raises(GenerationConfigError, match="no_speech_threshold=7"):
        WhisperGenerationConfig(path)

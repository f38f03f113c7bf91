"""Tests the tokens before a window's own."""

from __future__ import annotations

import pytest

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.speech.whisper_config import WhisperGenerationConfig, WhisperTokens, whisper_options
from staticllm.pipelines.speech.whisper_prompt import (
    ContextTokens,
    context_tokens,
    previous_tokens,
    start_tokens,
    window_prompt,
)

START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS, PLAIN = 50258, 50259, 50261, 50358, 50359, 50361, 50363
NO_CONTEXT = ContextTokens()


def options_of(**values):
    config = WhisperGenerationConfig(lang_to_id={"<|en|>": ENGLISH, "<|de|>": GERMAN}, eos_token_id=50257)
    return whisper_options(config, values)


def encode(text):
    """Return a token per character between the special tokens that OpenVINO's tokenizer adds all the same."""
    return [START, PLAIN, *map(ord, text), 50257]


def test_the_start_of_a_window():
    prompt = window_prompt(NO_CONTEXT, options_of(), "de", is_first=True, has_timestamps=False)
    assert (prompt.tokens, prompt.start) == ((START, GERMAN, TRANSCRIBE, PLAIN), 0)
    prompt = window_prompt(NO_CONTEXT, options_of(task="translate"), "en", is_first=True, has_timestamps=True)
    assert prompt.tokens == (START, ENGLISH, TRANSLATE)


def test_an_english_only_model_gets_neither_language_nor_task():
    tokens = WhisperTokens(decoder_start=50257, is_multilingual=False)
    assert start_tokens(tokens, "en", "transcribe") == [50257]


def test_an_unknown_language_is_refused():
    with pytest.raises(GenerationConfigError, match="xx"):
        start_tokens(options_of().tokens, "xx", "transcribe")


def test_initial_prompt_comes_before_the_first_window_and_hotwords_before_all():
    options = options_of(initial_prompt="ab", hotwords="c")
    context = context_tokens(options, encode)
    assert context == ContextTokens((32, 97, 98), (32, 99))
    first = window_prompt(context, options, "en", is_first=True, has_timestamps=True)
    later = window_prompt(context, options, "en", is_first=False, has_timestamps=True)
    assert first.tokens == (PREVIOUS, 32, 97, 98, 32, 99, START, ENGLISH, TRANSCRIBE)
    assert first.tokens[first.start] == START
    assert later.tokens == (PREVIOUS, 32, 99, START, ENGLISH, TRANSCRIBE)
    assert later.tokens[later.start] == START


def test_an_empty_text_is_a_space_as_in_genai():
    assert context_tokens(options_of(hotwords=""), encode).hotwords == (32,)


def test_without_hotwords_later_windows_follow_on_nothing():
    context = ContextTokens(initial_prompt=(5, 6))
    assert previous_tokens(context, options_of().tokens, is_first=False) == []


def test_of_a_long_text_the_last_223_tokens_count():
    context = ContextTokens(tuple(range(300)), tuple(range(300, 310)))
    found = previous_tokens(context, options_of().tokens, is_first=True)
    assert found == [PREVIOUS, *range(87, 310)]
    assert previous_tokens(context, options_of().tokens, is_first=True, max_target_positions=20)[1:] == [
        *range(301, 310)
    ]

"""The tokens that the decoder is given for a window of a recording, before those that it generates (as GenAI builds them)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from staticllm.errors import GenerationConfigError

from .whisper_config import Task, WhisperOptions, WhisperTokens

Encode: TypeAlias = Callable[[str], Sequence[int]]
"""The tokens of a text, without or with the special tokens that a tokenizer adds."""
MAX_TARGET_POSITIONS = 448
"""The most tokens of Whisper's decoder, ``max_target_positions`` of its ``config.json``."""
NO_LANGUAGE = "en"
"""What GenAI reports for a model that knows English only."""


@dataclass(frozen=True)
class ContextTokens:
    """The tokens of the texts that a window follows on: ``initial_prompt`` the first window only, ``hotwords`` each."""

    initial_prompt: tuple[int, ...] = ()
    hotwords: tuple[int, ...] = ()


def context_tokens(options: WhisperOptions, encode: Encode) -> ContextTokens:
    """Return the tokens of the two texts, each after a space; special tokens in them are left out."""

    def tokens_of(text: str | None) -> tuple[int, ...]:
        return tuple(token for token in encode(f" {text}") if token < options.tokens.eos) if text is not None else ()

    return ContextTokens(tokens_of(options.initial_prompt), tokens_of(options.hotwords))


def previous_tokens(
    context: ContextTokens, tokens: WhisperTokens, is_first: bool, max_target_positions: int = MAX_TARGET_POSITIONS
) -> list[int]:
    """Return ``<|startofprev|>`` and the text before a window; nothing without a text.

    Of the text, the last 223 tokens count (half of the decoder's positions less one, as openai-whisper and transformers), so that
    the other half is left for the window. GenAI does not shorten it.
    """
    text = (*(context.initial_prompt if is_first else ()), *context.hotwords)
    return [tokens.prev_sot, *text[-(max_target_positions // 2 - 1) :]] if text else []


def start_tokens(tokens: WhisperTokens, language: str, task: Task) -> list[int]:
    """Return ``<|startoftranscript|>``, and for a multilingual model the language and the task.

    Raises:
        GenerationConfigError: the model does not know the language.
    """
    if not tokens.is_multilingual:
        return [tokens.decoder_start]
    if language not in tokens.languages:
        raise GenerationConfigError(
            f"language={language!r} is not one of the model's: {', '.join(sorted(tokens.languages))}"
        )
    task_token = tokens.translate if task == "translate" else tokens.transcribe
    return [tokens.decoder_start, tokens.languages[language], task_token]


@dataclass(frozen=True)
class WindowPrompt:
    """The tokens ``[n]`` that the decoder is given for a window.

    The logits of row ``start`` tell the language and whether there is speech, those of the last row the first token.
    """

    tokens: tuple[int, ...]
    start: int
    """The index of ``<|startoftranscript|>``."""


def window_prompt(
    context: ContextTokens,
    options: WhisperOptions,
    language: str,
    is_first: bool,
    has_timestamps: bool,
    max_target_positions: int = MAX_TARGET_POSITIONS,
) -> WindowPrompt:
    """Return the prompt of a window.

    Args:
        context: The tokens of ``initial_prompt`` and ``hotwords``.
        options: The options of the transcription.
        language: The code of the language, given or detected; any for a model that knows English only.
        is_first: Whether the window is the first of its recording.
        has_timestamps: Whether timestamps are generated; for recordings of more than a window they always are.
        max_target_positions: The most tokens of the decoder.
    """
    tokens = options.tokens
    before = previous_tokens(context, tokens, is_first, max_target_positions)
    start = start_tokens(tokens, language, options.task)
    ending = [] if has_timestamps else [tokens.no_timestamps]
    return WindowPrompt((*before, *start, *ending), len(before))

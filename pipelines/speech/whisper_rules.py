"""Whisper's rules for the next token, by the options of a transcription."""

from __future__ import annotations

from ..generation.speech_rules import SpeechRules, TimestampParams
from .whisper_config import WhisperOptions, WhisperTokens


def whisper_rules(options: WhisperOptions, has_timestamps: bool) -> SpeechRules:
    """Return the rules for one window.

    Args:
        has_timestamps: Whether timestamps are generated.
    """
    tokens = options.tokens
    timestamps = TimestampParams(tokens.eos, tokens.timestamp_begin, options.max_initial_timestamp_index)
    return SpeechRules(
        options.begin_suppress_tokens, options.suppress_tokens, timestamps=timestamps if has_timestamps else None
    )


def language_rules(tokens: WhisperTokens) -> SpeechRules:
    """Return the rules for the token after ``<|startoftranscript|>``, with which the model says what language is spoken."""
    return SpeechRules(allowed_tokens=tuple(sorted(tokens.languages.values())))


def language_of(token: int, tokens: WhisperTokens) -> str:
    """Return the code of the language of a token that ``language_rules`` allow."""
    return next(code for code in sorted(tokens.languages) if tokens.languages[code] == token)


def no_speech_rules(tokens: WhisperTokens) -> SpeechRules:
    """Return the rules for the token after ``<|startoftranscript|>`` whose probability is that of no speech in the window."""
    return SpeechRules(allowed_tokens=(tokens.no_speech,))

"""Speech to text with Whisper, as far as the host computes it: features, prompts, rules for logits, timestamps and results."""

__all__ = [
    "audio_stream",
    "log_mel",
    "results",
    "speech_files",
    "speech_jobs",
    "speech_model",
    "subtitles",
    "transcription_handle",
    "transcription_watch",
    "whisper_config",
]
"""The modules that other rooms may use."""

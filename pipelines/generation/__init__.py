"""Checks generation options, and chooses tokens from logits."""

__all__ = [
    "beam_search",
    "drafts",
    "filters",
    "genai_adapters",
    "grammar",
    "grammar_mask",
    "logits_processors",
    "sampler",
    "speech_rules",
]
"""The modules that other rooms may use."""

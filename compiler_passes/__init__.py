"""Turns a stateful model into step programs, and an encoder into packed programs, of fixed shape, before a run."""

__all__ = [
    "decoder",
    "encoder",
    "lower",
    "lower_alignment",
    "lower_cross_window",
    "lower_encoder",
    "model_kind",
    "pass_pipeline",
]
"""The modules that other rooms may use."""

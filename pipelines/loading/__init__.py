"""Loads a model directory into an engine that can serve."""

__all__ = ["background", "decoder_kind", "export", "kind", "load", "npu_target", "weights_watch", "window_kind"]
"""The modules that other rooms may use."""

"""Texts become vectors: packing, the programs of encoders, and the queue of texts."""

__all__ = ["embedding_config", "encoder_files", "encoder_job", "encoder_kind", "encoder_runner"]
"""The modules that other rooms may use."""

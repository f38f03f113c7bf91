"""Models as people have them: GGUF files, from which model directories are made once, and names on Hugging Face."""

__all__ = ["converted", "gguf_architectures", "gguf_header", "hub", "hub_files", "model_at"]
"""The modules that other rooms may use."""

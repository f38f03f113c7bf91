"""Makes a model directory of a file in another format, in a process of its own."""

__all__ = ["gguf_tokenizer"]
"""The modules that other rooms may use."""

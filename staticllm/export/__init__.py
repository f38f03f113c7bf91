"""Makes model directories of Hugging Face models: with torch and optimum, in an environment and a process of their own."""

__all__ = ["tokenizer_texts"]
"""The modules that other rooms may use."""

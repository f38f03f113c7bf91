"""Prompts become token ids here, and generated tokens become text."""

__all__ = [
    "call",
    "chat_prompt",
    "conversations",
    "detokenizer",
    "handle",
    "input_processor",
    "inputs",
    "output_processor",
    "stop_checker",
    "streamers",
    "tokenizer_tools",
]
"""The modules that other rooms may use."""

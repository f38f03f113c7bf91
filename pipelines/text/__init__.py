"""Prompts become token ids here, and generated tokens become text."""

"""Checks generation options, and chooses tokens from logits."""

"""Adds drafts of the next tokens to decode steps where that pays, and checks them with the request's own sampler."""

__all__ = ["draft_model"]
"""The modules that other rooms may use."""

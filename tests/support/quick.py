"""Decides how many examples a test runs without ``--all``."""

from hypothesis import settings


def examples(count):
    """Return ``count`` with ``--all``; else the share of it that the quick profile has of Hypothesis's default of 100."""
    return count * settings.default.max_examples // 100

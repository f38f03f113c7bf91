"""How much of a test is run without ``--all``."""

from hypothesis import settings


def examples(count):
    """So many examples with ``--all``; else the share of them that the profile has of Hypothesis's own hundred."""
    return count * settings.default.max_examples // 100

"""Compiled step programs: their sizes, their costs, how they run."""

"""Compiled step programs: which sizes, what they cost, how they run."""

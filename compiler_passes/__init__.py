"""Turns a stateful model into step programs of fixed shape, before a run."""

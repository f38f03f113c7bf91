"""Turns a stateful model into step programs, and an encoder into packed programs, of fixed shape, before a run."""

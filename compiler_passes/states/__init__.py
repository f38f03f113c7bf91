"""Turns the state of a model into inputs and outputs, and states of keys and values into KV slots."""

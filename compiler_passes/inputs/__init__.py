"""Turns masks and positions that a model computes from lengths into inputs that the host fills."""

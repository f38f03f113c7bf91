"""Loads a model directory into an engine that can serve."""

"""Reproduces published tables with the simulator."""

"""The daemon's process: how it starts and ends, and what it serves."""

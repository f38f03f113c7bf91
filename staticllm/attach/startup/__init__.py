"""The folder that the launcher puts on PYTHONPATH."""

"""Finds reasoning and the calls of tools in an answer, as it is written."""

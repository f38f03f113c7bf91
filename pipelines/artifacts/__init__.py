"""Compiled programs as files: written whole, verified before use."""

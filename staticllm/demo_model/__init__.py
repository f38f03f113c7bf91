"""The embedded demo model: data, no code."""

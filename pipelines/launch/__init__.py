"""From what a user passes to an engine that serves."""

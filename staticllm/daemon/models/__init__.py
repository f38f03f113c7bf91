"""Models that clients load: where they come from, how they are compiled, and what runs them."""

"""Running programs of others with their models in the daemon."""

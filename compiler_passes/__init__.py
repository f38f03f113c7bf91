"""Before a run: a stateful model becomes step programs of fixed shape."""

"""The client's side of the daemon: an engine that runs in another process."""

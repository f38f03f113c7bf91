"""The engine owns a device and serves all requests on one thread."""

"""The engine: one thread that owns a device, and its requests."""

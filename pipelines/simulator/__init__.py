"""The simulator runs the engine's core on a virtual clock, with given costs per call."""

"""The simulator runs the engine's scheduling policies on a virtual clock, with given costs per call."""

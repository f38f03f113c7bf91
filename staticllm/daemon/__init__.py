"""The daemon owns the devices of this machine for one user; programs of that user share them through it."""

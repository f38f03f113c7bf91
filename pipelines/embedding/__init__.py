"""Texts become vectors: packing, the programs of encoders, and the queue of texts."""

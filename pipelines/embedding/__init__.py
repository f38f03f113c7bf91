"""Texts become vectors: packing, the programs of encoders, the queue of texts, and WINDVE's use of several devices."""

"""Serves texts on several devices at once: instances of an encoder, worker processes, and WINDVE on real devices."""

"""Messages and shared memory between the daemon and its clients; only the standard library and NumPy.

Programs of strangers load this package under another name, from a Python environment without staticllm. Therefore its imports
are relative, and it imports no other package of ours.
"""

__all__ = ["blocks", "channel", "endpoint", "file_stamp", "held_files", "messages", "tensors"]
"""The modules that other rooms may use."""

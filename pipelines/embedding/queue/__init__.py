"""The texts that wait for the devices of an encoder: the queue and its policies, planned calls, failures, and the threads."""

__all__ = ["device_queue"]
"""The modules that other rooms may use."""

"""Devices that several programs share: the order of calls, and the usage of each client."""

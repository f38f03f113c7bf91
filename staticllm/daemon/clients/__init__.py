"""Clients of the daemon: their connections, what each has, and what is sent to them."""

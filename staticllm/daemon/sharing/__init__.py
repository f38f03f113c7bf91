"""Devices that several programs use: which call runs next, and what each client used."""

"""Scheduling: what a policy sees, what it may return, and the shipped policies."""

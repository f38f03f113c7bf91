"""Scheduling decides which requests are in the next device call: the policies, their interface, and the rules of a plan."""

__all__ = ["device_share", "interface", "job_scheduler", "planner", "request_table"]
"""The modules that other rooms may use."""

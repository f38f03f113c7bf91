"""Scheduling: what a policy sees, what it may answer, and the policies that come with the library."""

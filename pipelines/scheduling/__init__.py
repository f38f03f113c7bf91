"""Scheduling decides which requests are in the next device call: the policies, their interface, and the rules of a plan."""

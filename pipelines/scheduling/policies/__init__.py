"""The shipped policies, each of which returns a plan for a view."""

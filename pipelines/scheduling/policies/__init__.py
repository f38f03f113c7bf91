"""The shipped policies: each one returns a plan for a view."""

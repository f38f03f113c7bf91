"""The policies: each one answers a view with a plan."""

"""The commands for encoders: they embed texts, rank them for a query, and plan machines."""

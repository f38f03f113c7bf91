"""What a call costs: measured, and predicted."""

"""What a connection and a body must be before an endpoint sees them."""

"""What a generation may be asked for, and how a token is chosen."""

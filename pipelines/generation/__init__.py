"""Generation options, and how a token is chosen from logits."""

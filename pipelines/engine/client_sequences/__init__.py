"""Client sequences: a client chooses their tokens, and the engine returns the logits after them."""

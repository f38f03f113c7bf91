"""The KV cache on the host keeps slots, masks, positions and sequences between steps."""

"""Between steps: slots, masks, positions and sequences."""

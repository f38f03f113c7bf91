"""Between steps: rows, masks, positions and sequences."""

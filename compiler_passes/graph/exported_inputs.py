"""Names the inputs of exported models that step programs do not have; ``ports.py`` names those of step programs."""

from __future__ import annotations

ATTENTION_MASK = "attention_mask"
"""``[1, T+S]``: 1 for each token. Masks replace it (``expose_mask``, ``expose_positions``)."""
INPUTS_EMBEDS = "inputs_embeds"
"""``[1, S, hidden]``: embeddings of tokens instead of their ids."""
BEAM_IDX = "beam_idx"
"""``[1]``: the sequence from which each beam continues. A step program has batch 1 (``lift_state``)."""
CACHE_POSITION = "cache_position"
"""``[S]``: places in a state's window (``fix_cache_position``)."""

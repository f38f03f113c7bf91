"""Limits what a program computes: the rows that get logits, and the sizes of one variant or of several."""

"""Packs the tokens of several texts into one call of an encoder, and writes the arrays of the call."""

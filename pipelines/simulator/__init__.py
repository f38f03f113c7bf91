"""Simulator: the policies of the library on a virtual clock, over a table of costs."""

"""Rewrites attention and projections into forms that compute the same values faster."""

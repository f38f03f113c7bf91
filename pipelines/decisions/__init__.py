"""Decisions: typed questions about one state, answered by probabilities; no text is generated."""

__all__ = ["answers", "calibration", "decider", "handle", "questions", "written"]

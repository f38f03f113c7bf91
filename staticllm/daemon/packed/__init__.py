"""Stateful language models of other programs: their infer requests become sequences of our engine."""

"""Grammars: an answer is JSON of a schema, a match of a regular expression, or a sentence of a grammar."""

"""JSON schemas with keywords that llguidance does not know, written with keywords that it knows."""

"""Chat templates: foreign code that makes one prompt of a conversation, within bounds of time, size and depth."""

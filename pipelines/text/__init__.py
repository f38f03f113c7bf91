"""From a prompt to token ids, and from tokens to text."""

"""Speech to text with Whisper, as far as the host computes it: features, prompts, rules for logits, timestamps and results."""

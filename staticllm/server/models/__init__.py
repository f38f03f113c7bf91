"""The served models: their life, who may use them, and the threads and processes in which they work."""

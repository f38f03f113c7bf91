"""Models as people have them, and the model directories that are made of them once."""

"""Models as people have them: GGUF files, from which model directories are made once, and names on Hugging Face."""

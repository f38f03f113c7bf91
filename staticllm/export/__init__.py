"""Makes model directories of Hugging Face models: with torch and optimum, in an environment and a process of their own."""

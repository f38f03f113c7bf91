"""The endpoints of Ollama's API: chats, texts, vectors, and what is known about the models."""

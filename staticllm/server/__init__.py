"""The server: OpenAI's API over HTTP for the models of this machine (``staticllm serve``)."""

"""The commands that ask a server of ``staticllm serve``, here or on another machine."""

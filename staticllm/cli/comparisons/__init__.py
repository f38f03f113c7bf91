"""What ``staticllm simulate`` prints beside other results: those of the engine, and those that papers published."""

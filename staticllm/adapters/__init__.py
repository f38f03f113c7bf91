"""LoRA adapters: their files, and the set of adapters that a pipeline is loaded with."""

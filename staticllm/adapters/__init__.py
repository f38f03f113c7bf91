"""LoRA adapters: their files, and the set of adapters that a pipeline is loaded with."""

__all__ = ["adapter_set", "lora", "safetensors_file"]
"""The modules that other rooms may use."""

"""Files, memory, threads and processes of the operating system."""

__all__ = [
    "bf16",
    "file_lock",
    "files",
    "heap",
    "ir_file",
    "load_progress",
    "long_calls",
    "mapped_weights",
    "posix",
    "processor_use",
    "scratch_folder",
    "signal_stack",
    "table",
    "threads",
    "typed",
]
"""The modules that other rooms may use."""
